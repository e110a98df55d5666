"""What tests over meshes use: the collectives of a compiled program."""

from collections import Counter

from lowmembp_jax.memory.parsing import hlo_text

_KINDS = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"


def _found(compiled) -> list[tuple[str, int]]:
    """The kind of each collective, and the bytes of its results."""
    computations = hlo_text.parse(compiled.as_text()).computations.values()
    every = [one for computation in computations for one in computation.instructions.values()]
    kinds = [(one.opcode.removesuffix("-done"), one) for one in every]
    return [(kind, sum(s.bytes for s in one.shapes)) for kind, one in kinds if kind in _KINDS]


def collectives(compiled) -> Counter[str]:
    """How many collectives of each kind there are."""
    return Counter(kind for kind, _ in _found(compiled))


def exchanged(compiled) -> Counter[str]:
    """Bytes of the results of the collectives of each kind."""
    size = Counter()
    for kind, count in _found(compiled):
        size[kind] += count
    return size
