"""Compares the memory of two plans."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lowmembp_jax._messages import GivenError
from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.memory.result import PARTS, Plan, aligned
from lowmembp_jax.memory.scopes import layers_together

_SHOWN = 15  # modules in the text


def describe(before: Plan, after: Plan) -> str:
    """Formats the changes between two plans: by part, and by module at the peak.

    Modules count the buffers in `Plan.live`, which have at least a thousandth of the peak.
    """
    head = ("before", "after", "change")
    parts = [
        (name.replace("_", " "), *_change(getattr(before, name), getattr(after, name)))
        for name in (*PARTS, "peak")
    ]
    old, new = _by_module(before), _by_module(after)
    changed = sorted(old | new, key=lambda key: -abs(new[key] - old[key]))
    modules = [
        (key[0].replace("_", " "), key[1], *_change(old[key], new[key]))
        for key in changed[:_SHOWN]
        if old[key] != new[key]
    ]
    lines = [
        *aligned(("part", *head), *parts, left=("part",)),
        "",
        "largest changes at the peak, summed over layers:",
        *aligned(("part", "from", *head), *modules, left=("part", "from")),
    ]
    return "\n".join(lines)


def _change(before: int, after: int) -> tuple[str, str, str]:
    growth = after - before
    sign = "-" if growth < 0 else "+" if growth else ""
    return format_bytes(before), format_bytes(after), sign + format_bytes(abs(growth))


def _by_module(plan: Plan) -> Counter[tuple[str, str]]:
    """Bytes at the peak by part, and by module (one name for all layers) or argument."""
    total: Counter[tuple[str, str]] = Counter()
    for buffer in plan.live:
        where = layers_together(buffer.module)
        if not buffer.module and not buffer.source:  # an argument
            where = re.split(r"[.\[]", buffer.op)[0]
        total[buffer.part, where] += buffer.bytes
    return total


def read_plan(path: Path, method: str | None = None) -> Plan:
    """Reads a plan that `lowmembp plan --json` or `Plan.to_json` wrote.

    Raises:
      GivenError: the file has no plan, or several and `method` names none of them.
    """
    try:
        data = json.loads(path.read_text())
        plans: dict[Any, Any] = {method: data}
        if "methods" in data:
            plans = {one["method"]: one["plan"] for one in data["methods"]}
        if method is None and len(plans) == 1:
            method = next(iter(plans))
        if method in plans:
            plan = Plan.from_dict(plans[method])
            describe(plan, plan)  # a value that should be a number raises its error here
            return plan
        given = "none" if method is None else repr(method)
        reason = f"{path}: --method: expected one of {', '.join(plans)}, got {given}"
    # A file that is not a plan can fail in any of these ways.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GivenError(f"{path}: expected a file of `lowmembp plan --json`: {error}") from error
    raise GivenError(reason)
