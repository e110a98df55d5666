"""Products whose operands XLA pads, to split them over the GPU.

A product of few results and many terms, such as the gradient of a LoRA matrix by all rows of a
batch, would keep most of a GPU idle: XLA's split-K makes 2 to 2,048 products of it. Where the terms
are no multiple of that, it copies both operands with zeros behind them. The scheduler sees copies
that free nothing and puts them off, with unrolled layers until the end of the backward: all
operands stay until then, as under no checkpointing.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from lowmembp_jax.memory.parsing.hlo_text import Instruction, Program
from lowmembp_jax.memory.sizes import format_bytes

_SPLIT_K = "xla_gpu_experimental_force_split_k"
_MULTIPLE = 64  # cuBLAS has operands padded too, to a multiple of 8


class _Pad(NamedTuple):
    bytes: int
    terms: int
    padded: int
    ready: int  # the place in the schedule of the last operand
    place: int


def padded_products(
    program: Program, peak: int, peak_with: Callable[[str, Any], int]
) -> Iterator[str]:
    """A note for a `Plan`, where copies that wait are a quarter of the peak.

    Args:
      program: what is planned.
      peak: bytes.
      peak_with: compiles with an option, and gives the peak.
    """
    places = {name: place for place, name in enumerate(program.entry.instructions)}
    every = program.entry.instructions.values()
    pads = [pad for instruction in every for pad in _pads(program, instruction, places)]
    changes = [(pad.ready, pad.bytes) for pad in pads]
    changes += [(pad.place, -pad.bytes) for pad in pads]
    waiting = max(accumulate(change for _, change in sorted(changes)), default=0)
    if not pads or 4 * waiting < peak:
        return
    most = max(pads)
    multiple = max(pad.padded & -pad.padded for pad in pads)  # powers of 2
    without = peak_with(_SPLIT_K, 1)
    helps = f". With the compiler option {_SPLIT_K}=1 the peak is {format_bytes(without)}"
    helps += f" in place of {format_bytes(peak)}, and these products are slower"
    yield (
        f"XLA pads {len(pads)} operands of products that it splits, such as {most.terms:,} rows to "
        f"{most.padded:,}, and puts them off: {format_bytes(waiting)} wait at once. A batch whose "
        f"rows are a multiple of {multiple} or more may take much less"
        + (helps if without < 0.95 * peak else "")
    )


def _pads(program: Program, instruction: Instruction, places: dict[str, int]) -> Iterator[_Pad]:
    """What is no pad of JAX's, which would have a name."""
    if instruction.opcode != "fusion":
        return
    called = program.computations[instruction.calls[0]]
    root = called.instructions[called.root]
    if root.opcode == "pad" and not root.op_name:
        [shape] = root.shapes
        for size, added in zip(shape.dims, _added(root), strict=True):
            if added and size % _MULTIPLE == 0:
                ready = max(places[operand] for operand in instruction.operands)
                place = places[instruction.name]
                yield _Pad(shape.bytes, size - added, size, ready, place)


def _added(pad: Instruction) -> list[int]:
    """How many elements are behind each axis: `padding=0_80x0_0`."""
    axes = pad.attribute("padding").split("x")
    return [int(axis.split("_")[1]) for axis in axes]
