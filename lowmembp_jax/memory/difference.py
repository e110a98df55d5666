"""Compares the memory of two plans."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lowmembp_jax._errors import GivenError
from lowmembp_jax.memory.report import aligned
from lowmembp_jax.memory.result import PARTS, Plan
from lowmembp_jax.memory.scopes import layers_together
from lowmembp_jax.memory.sizes import format_bytes

# The number of modules that the text shows.
_SHOWN = 15


@dataclass(frozen=True)
class Change:
    """Bytes on each device in two plans, of a part or of a module's share of it.

    Attributes:
      part: one of `lm.memory.PARTS`, or "peak".
      where: the module (one name for all layers), or the argument; "" for a whole part.
      before: bytes in the first plan.
      after: bytes in the second plan.
    """

    part: str
    where: str
    before: int
    after: int

    @property
    def bytes(self) -> int:
        """Growth in bytes."""
        return self.after - self.before

    @property
    def cells(self) -> tuple[str, str, str]:
        """The cells of a row: before, after, and the growth with its sign."""
        sign = "-" if self.bytes < 0 else "+" if self.bytes else ""
        growth = sign + format_bytes(abs(self.bytes))
        return format_bytes(self.before), format_bytes(self.after), growth


def describe(before: Plan, after: Plan) -> str:
    """Formats the changes between two plans: by part, and by module at the peak."""
    head = ("before", "after", "change")
    parts = [(one.part.replace("_", " "), *one.cells) for one in changes_by_part(before, after)]
    modules = [
        (one.part.replace("_", " "), one.where, *one.cells)
        for one in changes_by_module(before, after)[:_SHOWN]
    ]
    lines = [
        *aligned(("part", *head), *parts, left=("part",)),
        "",
        "largest changes at the peak, summed over layers:",
        *aligned(("part", "from", *head), *modules, left=("part", "from")),
    ]
    return "\n".join(lines)


def changes_by_part(before: Plan, after: Plan) -> list[Change]:
    """The change of each part, and the change of the peak last."""
    return [
        Change(name, "", getattr(before, name), getattr(after, name)) for name in (*PARTS, "peak")
    ]


def changes_by_module(before: Plan, after: Plan) -> list[Change]:
    """The changes at the peak by part and module, the largest first.

    They count the buffers in `Plan.live`, which have at least a thousandth of the peak.
    """
    sizes = _by_module(before), _by_module(after)
    found = [Change(*key, *(size[key] for size in sizes)) for key in sizes[0] | sizes[1]]
    return sorted((one for one in found if one.bytes), key=lambda one: -abs(one.bytes))


def _by_module(plan: Plan) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for buffer in plan.live:
        where = layers_together(buffer.module)
        if not buffer.module and not buffer.source:  # an argument
            where = re.split(r"[.\[]", buffer.op)[0]
        total[buffer.part, where] += buffer.bytes
    return total


def _checked(plan: Plan) -> Plan:
    """Returns the plan. A value that should be a number raises its error here, before a report."""
    changes_by_part(plan, plan)
    changes_by_module(plan, plan)
    return plan


def read_plan(path: Path, method: str | None = None) -> Plan:
    """Reads a plan that `lowmembp plan --json` or `Plan.to_json` wrote.

    Raises:
      GivenError: the file has no plan, or several and `method` names none of them.
    """
    try:
        data = json.loads(path.read_text())
        if "methods" not in data:
            return _checked(Plan.from_dict(data))
        plans = {one["method"]: one["plan"] for one in data["methods"]}
        if method is None and len(plans) == 1:
            method = next(iter(plans))
        if method in plans:
            return _checked(Plan.from_dict(plans[method]))
        given = "none" if method is None else repr(method)
        reason = f"{path}: --method: expected one of {', '.join(plans)}, got {given}"
    # A file that is not a plan can fail in any of these ways.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GivenError(f"{path}: expected a file of `lowmembp plan --json`: {error}") from error
    raise GivenError(reason)
