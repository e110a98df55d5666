"""What grew and what shrank between two plans."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lowmembp_jax._errors import GivenError
from lowmembp_jax.memory.result import PARTS, Plan
from lowmembp_jax.memory.roofline.totals import layers_together


@dataclass(frozen=True)
class Change:
    """Bytes of something in two plans, on each device.

    Attributes:
      part: one of `lm.memory.PARTS`, or "peak".
      where: the module, layers together, or the argument; "" for a whole part.
    """

    part: str
    where: str
    before: int
    after: int

    @property
    def bytes(self) -> int:
        """What it grew by."""
        return self.after - self.before


def changes_by_part(before: Plan, after: Plan) -> list[Change]:
    """A change for each part, and the peak's last."""
    return [
        Change(name, "", getattr(before, name), getattr(after, name)) for name in (*PARTS, "peak")
    ]


def changes_by_module(before: Plan, after: Plan) -> list[Change]:
    """What changed at the peak, by part and module, the largest change first.

    Counted is what a plan lists as live: buffers from a thousandth of the peak on.
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
    """The plan; what is no number in it raises an error here, and not in the report."""
    changes_by_part(plan, plan)
    changes_by_module(plan, plan)
    return plan


def read_plan(path: Path, method: str | None = None) -> Plan:
    """A plan that `lowmembp plan --json` or `Plan.to_json` wrote.

    Args:
      path: of the file.
      method: of several methods in the file.

    Raises:
      GivenError: there is none in the file, or several and no `method`.
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
        reason = f"{path}: --method is {given}: accepted are {', '.join(plans)}"
    # What is not a plan can fail in any of these ways.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GivenError(f"{path} holds no plan of `lowmembp plan --json`: {error}") from error
    raise GivenError(reason)
