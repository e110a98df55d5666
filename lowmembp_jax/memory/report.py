"""Formats plans, comparisons and devices as tables for a terminal."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowmembp_jax.memory.choice import NothingFitsError, fastest_of
from lowmembp_jax.memory.comparison import Comparison, MethodPlan
from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.difference import Change, changes_by_module, changes_by_part
from lowmembp_jax.memory.result import PARTS, Plan
from lowmembp_jax.memory.roofline.totals import layers_together
from lowmembp_jax.memory.sizes import format_bytes

_ESTIMATE = "Times are estimates by the roofline; memory is XLA's buffer assignment."


def _table(title: str, *columns: str, left: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or name in left else "right")
    return table


def _limit(plan: Plan) -> str:
    what = "usable" if plan.budget is None else "budget"
    capacity = format_bytes(plan.device.memory_bytes)
    return f"{plan.device.times(plan.device_count)} ({capacity}), {format_bytes(plan.limit)} {what}"


def _notes(devices: Iterable[Device], *notes: str) -> Text:
    rates = (f"Rates of {device.name}: {device.calibration}." for device in devices)
    return Text("\n".join((_ESTIMATE, *rates, *(f"Note: {note}." for note in notes))))


def plan_report(one: MethodPlan, title: str, largest: int = 12) -> RenderableType:
    """Formats one plan: its parts, the buffers at the peak, and the work of the kernels.

    Args:
      one: the plan of one method.
      title: the name of the planned step.
      largest: number of kinds of buffers to show.
    """
    plan = one.plan
    parts = _table(f"{title}\n{_limit(plan)}", "part", "on each device", "of the peak")
    for name in PARTS:
        size = getattr(plan, name)
        parts.add_row(name.replace("_", " "), format_bytes(size), f"{size / plan.peak:.1%}")
    parts.add_section()
    parts.add_row("peak", format_bytes(plan.peak), plan.verdict)
    if plan.host:
        parts.add_row("the host's memory", format_bytes(plan.host), "")
    if one.largest_batch is not None:
        parts.caption = f"largest batch that fits: {one.largest_batch:,}"

    live = _table(
        "Largest at the peak, summed over layers", "size", "part", "arrays", "from",
        left=("part", "arrays", "from"),
    )  # fmt: skip
    live.columns[0].justify = "right"
    for (part, array, origin), sizes in _of_all_layers(plan)[:largest]:
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        live.add_row(format_bytes(sum(sizes)), part.replace("_", " "), count + array, origin)

    cost = plan.cost
    phases = _table("Kernels (estimates)", "phase", "moved", "TFLOP", "time", "launches")
    for name, part in cost.by("phase").items():
        phases.add_row(name, *_work(part))
    phases.add_section()
    phases.add_row("step", *_work(cost))
    return Group(parts, live, phases, _notes([plan.device], *plan.notes, *cost.notes))


def _of_all_layers(plan: Plan) -> list[tuple[tuple[str, str, str], list[int]]]:
    """Groups buffers that differ only in the numbers in their module paths, with their sizes."""
    groups = defaultdict(list)
    for buffer in plan.live:
        module = layers_together(buffer.module)
        origin = " ".join(filter(None, (module, buffer.op, buffer.source)))
        groups[buffer.part, buffer.shape, origin].append(buffer.bytes)
    return sorted(groups.items(), key=lambda group: -sum(group[1]))


def _work(cost) -> tuple[str, str, str, str]:
    return (
        format_bytes(cost.bytes_moved),
        f"{cost.flops / 1e12:.2f}",
        f"{cost.estimated_seconds * 1e3:.1f} ms",
        f"{cost.launches:,}",
    )


def comparison_report(
    comparison: Comparison, title: str, notes: Sequence[str] = ()
) -> RenderableType:
    """Formats a row for each method: peak, its largest parts, bytes moved, FLOPs, time, rate and
    largest batch.

    Below the table are the plans' notes, `notes`, and the fastest method that fits.
    """
    first = comparison.methods[0].plan
    counted = {"examples/s": comparison.batch, "tokens/s": comparison.tokens}
    rates = {name: count for name, count in counted.items() if count}
    columns = [
        "method",
        "peak",
        "intermediates",
        "temporaries",
        "moved",
        "TFLOP",
        "time (estimate)",
        *rates,
    ]
    searched = comparison.methods[0].largest_batch is not None
    table = _table(
        f"{title}\n{_limit(first)}",
        *columns,
        *(["largest batch"] if searched else []),
        "",
    )
    for one in comparison:
        cost = one.plan.cost
        table.add_row(
            one.method,
            *map(format_bytes, (one.plan.peak, one.plan.intermediates, one.plan.temporaries)),
            *_work(cost)[:3],
            *(f"{count / cost.estimated_seconds:,.0f}" for count in rates.values()),
            *([f"{one.largest_batch:,}"] if searched else []),
            one.plan.verdict,
        )
    try:
        outcome = str(fastest_of(comparison))
    except NothingFitsError as error:
        outcome = str(error)
    return Group(table, _notes([first.device], *comparison.notes, *notes), Text(f"\n{outcome}"))


def difference_report(before: Plan, after: Plan, title: str, largest: int = 15) -> RenderableType:
    """Formats the changes between two plans: by part, and by module at the peak."""
    columns = ("before", "after", "change")
    parts = _table(title, "part", *columns)
    for one in changes_by_part(before, after):
        if one.part == "peak":
            parts.add_section()
        parts.add_row(one.part.replace("_", " "), *_change(one))
    modules = _table(
        "Largest changes at the peak, summed over layers", "part", "from", *columns, left=("from",)
    )
    for one in changes_by_module(before, after)[:largest]:
        modules.add_row(one.part.replace("_", " "), one.where, *_change(one))
    return Group(parts, modules)


def _change(one: Change) -> tuple[str, str, str]:
    sign = "-" if one.bytes < 0 else "+" if one.bytes else ""
    change = sign + format_bytes(abs(one.bytes))
    return format_bytes(one.before), format_bytes(one.after), change


def sweep_report(
    found: Sequence[MethodPlan], refused: dict[str, str], title: str
) -> RenderableType:
    """Formats a row for each GPU, the smallest first, and the smallest GPU that fits.

    Args:
      found: plans of one method for several GPUs.
      refused: GPUs that cannot run the step -> the reason.
      title: the name of the planned step.
    """
    table = _table(title, "device", "memory", "limit", "peak", "time (estimate)", "")
    for one in found:
        plan = one.plan
        table.add_row(
            plan.device.name,
            *map(format_bytes, (plan.device.memory_bytes, plan.limit, plan.peak)),
            f"{plan.cost.estimated_seconds * 1e3:.1f} ms",
            plan.verdict,
        )
    fitting = next((one.plan for one in found if one.plan.fits), None)
    outcome = "the step fits in none of these GPUs"
    if fitting is not None:
        outcome = (
            f"the smallest GPU that fits: {fitting.device.name}, "
            f"{format_bytes(fitting.peak)} of {format_bytes(fitting.limit)}"
        )
    notes = dict.fromkeys(note for one in found for note in (*one.plan.notes, *one.plan.cost.notes))
    notes.update(dict.fromkeys(refused.values()))
    notes["`lowmembp devices` says where the rates of each GPU come from"] = None
    return Group(table, _notes((), *notes), Text(f"\n{outcome}"))


def devices_report(devices: Iterable[Device]) -> RenderableType:
    """Formats a row for each GPU: memory, bandwidth, matrix rates, and who measured products."""
    table = _table(
        "GPUs that the planner knows", "name", "GPU", "memory", "usable at 0.75", "bandwidth",
        "bf16 or f16", "tf32", "products measured by", left=("GPU", "products measured by"),
    )  # fmt: skip
    for device in devices:
        rates = device.matrix_flops
        half = rates.get("bf16", rates.get("f16", 0))
        table.add_row(
            device.name,
            device.description,
            format_bytes(device.memory_bytes),
            format_bytes(device.usable_bytes()),
            f"{device.bandwidth / 1e9:,.0f} GB/s",
            f"{half / 1e12:,.0f} TFLOP/s",
            f"{rates['f32'] / 1e12:,.0f} TFLOP/s" if "f32" in rates else "",
            device.calibration.products_source,
        )
    return table
