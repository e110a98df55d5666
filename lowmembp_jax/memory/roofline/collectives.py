"""Counts the bytes that a compiled program's collectives send between devices."""

import math
import re

from lowmembp_jax.memory.parsing.hlo_text import Instruction, Shape

_COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "ragged-all-to-all", "reduce-scatter",
}  # fmt: skip
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]*)\}"  # {{0,1},{2,3}}
    r"|\[\d+,(\d+)\]"  # [groups,devices]<=[...]
    r"|mesh\[([^\]]*)\] \{([^}]*)\})"  # mesh['x'=4,'y'=2] {'y'}
)


def is_collective(opcode: str) -> bool:
    """Whether an opcode is a collective, or starts an asynchronous one (all-reduce-start)."""
    return opcode.removesuffix("-start") in _COLLECTIVES


def link_bytes(
    instruction: Instruction, operands: tuple[Shape, ...], results: tuple[Shape, ...]
) -> int:
    """Counts the bytes that each device sends with NCCL's ring algorithms; 0 if not a collective.

    With n devices, an all-reduce sends 2 (n - 1) / n of its operand. A reduce-scatter and an
    all-to-all send (n - 1) / n of it. An all-gather sends (n - 1) / n of its result. A permute
    sends its operand.
    """
    if not is_collective(instruction.opcode):
        return 0
    sent = sum(shape.bytes for shape in operands)
    devices = group_size(instruction)
    others = (devices - 1) / devices if devices else 1.0
    match instruction.opcode.removesuffix("-start"):
        case "all-reduce":
            return round(2 * others * sent)
        case "all-gather":
            return round(others * sum(shape.bytes for shape in results))
        case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
            return round(others * sent)
    return sent


def group_size(instruction: Instruction) -> int | None:
    """Counts the devices that take part; None if all do and the program does not give a number."""
    found = _GROUPS.search(instruction.attributes)
    if found is None:
        return None
    listed, devices, axes, used = found.groups()
    if listed is not None:
        return len(listed.split(",")) if listed else None
    if devices is not None:
        return int(devices)
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", axes))
    # The program writes a part of an axis as 'x':(before)size.
    names = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", used)
    return math.prod(int(part or sizes[name]) for name, part in names)
