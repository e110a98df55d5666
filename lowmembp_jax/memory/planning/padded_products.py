"""Products whose operands XLA pads, to split them over the GPU.

A product of few results and many terms, such as the gradient of a LoRA matrix by all rows of a
batch, would keep most of a GPU idle: XLA's split-K makes 2 to 2,048 products of it. Where the terms
are no multiple of that, it copies both operands with zeros behind them. The scheduler sees copies
that free nothing and puts them off, with unrolled layers until the end of the backward: all
operands stay until then, as under no checkpointing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from lowmembp_jax.memory.hlo.program import Instruction, Program
from lowmembp_jax.memory.sizes import format_bytes

_MULTIPLE = 64  # cuBLAS has operands padded too, to a multiple of 8


class _Pad(NamedTuple):
    bytes: int
    terms: int
    padded: int


def padded_products(program: Program, peak: int) -> Iterator[str]:
    """A note for a `Plan`, where the copies take a tenth of the peak together.

    Args:
      program: what is planned.
      peak: bytes.
    """
    pads = [pad for one in program.entry.instructions.values() for pad in _pads(program, one)]
    total = sum(pad.bytes for pad in pads)
    if not pads or 10 * total < peak:
        return
    most = max(pads)
    multiple = max(pad.padded & -pad.padded for pad in pads)  # powers of 2
    yield (
        f"XLA pads {len(pads)} operands of products that it splits, such as {most.terms:,} rows to "
        f"{most.padded:,}, {format_bytes(total)} together, and may keep all of them until the end: "
        f"a batch whose rows are a multiple of {multiple} or more can take much less; so can the "
        f"compiler option xla_gpu_experimental_force_split_k=1, with slower products"
    )


def _pads(program: Program, instruction: Instruction) -> Iterator[_Pad]:
    """What is no pad of JAX's, which would have a name."""
    if instruction.opcode != "fusion":
        return
    called = program.computations[instruction.calls[0]]
    root = called.instructions[called.root]
    if root.opcode == "pad" and not root.op_name:
        [shape] = root.shapes
        for size, added in zip(shape.dims, _added(root), strict=True):
            if added and size % _MULTIPLE == 0:
                yield _Pad(shape.bytes, size - added, size)


def _added(pad: Instruction) -> list[int]:
    """How many elements are behind each axis: `padding=0_80x0_0`."""
    axes = pad.attribute("padding").split("x")
    return [int(axis.split("_")[1]) for axis in axes]
