"""Notes products whose operands XLA pads before it splits them over the GPU.

A product with few results and many terms leaves most of a GPU idle. An example is the gradient of a
LoRA matrix, which sums over all rows of a batch. XLA's split-K turns it into 2 to 2,048 products.
If the number of terms is not a multiple of that, XLA copies both operands and appends zeros. The
copies free no memory, so the scheduler delays them. With unrolled layers it delays them to the end
of the backward pass, and all operands stay alive until then, as without checkpointing.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from lowmembp_jax.memory.parsing.hlo_text import Instruction, Program
from lowmembp_jax.memory.sizes import format_bytes

_SPLIT_K = "xla_gpu_experimental_force_split_k"
_MULTIPLE = 64  # XLA also pads operands for cuBLAS, to a multiple of 8


class _Pad(NamedTuple):
    bytes: int
    terms: int
    padded: int
    ready: int  # the last operand's index in the schedule
    place: int  # the copy's index in the schedule


def padded_products(
    program: Program, peak: int, peak_with: Callable[[str, Any], int]
) -> Iterator[str]:
    """Yields a note for a `Plan` if delayed copies hold a quarter of the peak.

    Args:
      program: the planned program.
      peak: peak memory in bytes.
      peak_with: compiles with one more compiler option and returns the peak in bytes.
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
    helps += f" instead of {format_bytes(peak)}, and these products are slower"
    yield (
        f"XLA pads {len(pads)} operands of products that it splits, such as {most.terms:,} rows to "
        f"{most.padded:,}, and delays the copies: {format_bytes(waiting)} wait at once. A batch "
        f"whose rows are a multiple of {multiple} or more may take much less"
        + (helps if without < 0.95 * peak else "")
    )


def _pads(program: Program, instruction: Instruction, places: dict[str, int]) -> Iterator[_Pad]:
    """Yields the instruction if it is XLA's own pad. A pad from JAX has a name."""
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
    """Returns the number of elements that are appended to each axis: `padding=0_80x0_0`."""
    axes = pad.attribute("padding").split("x")
    return [int(axis.split("_")[1]) for axis in axes]
