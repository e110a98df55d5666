"""Counts what the kernels of a compiled program move and compute, apart from its products."""

import re
from typing import NamedTuple

from lowmembp_jax.memory.parsing import hlo_text

#: The instructions an element that XLA expands some operations to, roughly; the others are one.
_LONG = {
    "divide": 8, "exponential": 6, "log": 8, "logistic": 12, "power": 20, "rsqrt": 4, "sqrt": 6,
    "tanh": 12,
}  # fmt: skip
_FREE = "bitcast broadcast constant get-tuple-element iota parameter reduce reshape transpose tuple"
_KERNELS = "add convert copy fusion multiply reduce transpose"


class Kernels(NamedTuple):
    """The counts of some kernels.

    Attributes:
      count: how many they are.
      moved: the bytes of their operands and results.
      instructions: how many they run, for all elements.
      writers: how many write numbers of 8 bits.
      heavy: how many in the backward run more than 60 instructions an element.
    """

    count: int = 0
    moved: int = 0
    instructions: int = 0
    writers: int = 0
    heavy: int = 0


def kernels_of(text: str, scope: str) -> Kernels:
    """Counts the kernels that move at least 256 KiB; products and attention are left out.

    Args:
      text: the compiled program, `compiled.as_text()`.
      scope: a regular expression that finds the kernels' `op_name`.
    """
    found, entry = Kernels(), hlo_text.parse(text).entry.instructions
    for kernel in entry.values():
        is_product = kernel.name.startswith("gemm_fusion")
        if kernel.opcode not in _KERNELS.split() or is_product:
            continue
        read = [shape for name in kernel.operands for shape in entry[name].shapes]
        moved = sum(shape.bytes for shape in (*kernel.shapes, *read))
        if moved < 2**18 or not re.search(scope, kernel.op_name):
            continue
        sizes = {each: sum(s.size for s in each.shapes) for each in kernel.inner}
        work = sum(
            _LONG.get(each.opcode, 1) * size
            for each, size in sizes.items()
            if each.opcode not in _FREE.split()
        )
        is_backward = "transpose(" in kernel.op_name
        is_heavy = is_backward and work > 60 * max(sizes.values(), default=0)
        stores = any(shape.dtype in ("f8e4m3fn", "s8") for shape in kernel.shapes)
        own = 1, moved, work, stores, is_heavy
        found = Kernels(*map(sum, zip(found, own, strict=True)))
    return found
