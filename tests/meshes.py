"""What tests over meshes use: the collectives of a compiled program."""

import math
import re
from collections import Counter

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def _found(compiled) -> list[tuple[str, list[tuple[str, str]]]]:
    """The kind of each collective, and dtypes and dimensions of its results."""
    found = []
    for shapes, kind, start in re.findall(rf"= (.*?) ({_KINDS})(-start)?\(", compiled.as_text()):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        if start and (kind != "all-reduce" or shapes.startswith("((")):  # operands, then results
            arrays = arrays[len(arrays) // 2 :]
        found.append((kind, arrays))
    return found


def collectives(compiled) -> Counter[str]:
    """How many collectives of each kind there are."""
    return Counter(kind for kind, _ in _found(compiled))


def exchanged(compiled) -> Counter[str]:
    """Bytes of the results of the collectives of each kind."""
    size = Counter()
    for kind, arrays in _found(compiled):
        for dtype, dims in arrays:
            bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
            size[kind] += bits * math.prod(int(one) for one in dims.split(",") if one) // 8
    return size
