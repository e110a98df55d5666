"""What tests over meshes use: the collectives of a compiled program."""

import math
import re
from collections import Counter

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def _found(compiled) -> list[tuple[str, str]]:
    """Shapes and kind of each collective."""
    return re.findall(rf"= (.*?) ({_KINDS})(?:-start)?\(", compiled.as_text())


def collectives(compiled) -> Counter[str]:
    """How many collectives of each kind there are."""
    return Counter(kind for _, kind in _found(compiled))


def exchanged(compiled) -> Counter[str]:
    """Bytes of the results of the collectives of each kind."""
    size = Counter()
    for shapes, kind in _found(compiled):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
            size[kind] += bits * math.prod(int(one) for one in dims.split(",") if one) // 8
    return size
