"""Draws plans: the memory of one plan over the program, and memory and time of several methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.memory.comparison import Comparison, MethodPlan
from lowmembp_jax.memory.result import PARTS, Plan

_GIB = 2**30
#: JAX's own methods, and text; this library's methods. Both can be read on light and dark pages.
GRAY, BLUE = "#7d8590", "#2f81f7"
#: matplotlib's settings for all pictures of the project. Text in a .svg stays text.
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), GRAY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **{"grid.alpha": 0.3, "legend.framealpha": 0, "svg.fonttype": "none"},
    "svg.hashsalt": "lowmembp_jax",  # the same file in every run
}


def is_ours(method: str) -> bool:
    """Whether a method is this library's."""
    return any(name in method for name in ("compress", "lowmembp"))


def draw_points(
    axes: Any, points: Mapping[str, tuple[float, float]], *, from_zero: bool = False
) -> None:
    """Draws a labelled point for each method, this library's filled and blue.

    Call it last, because labels move away from points and from other labels. `from_zero`: whether
    the horizontal axis begins at 0.
    """
    for method, point in points.items():
        color = BLUE if is_ours(method) else GRAY
        face = color if is_ours(method) else "none"
        axes.plot(*point, "o", ms=8, color=color, markerfacecolor=face)
    axes.margins(0.2)
    if from_zero:
        axes.set_xlim(left=0)
    axes.grid()
    axes.figure.draw_without_rendering()  # the layout decides where a point is
    frame = axes.get_window_extent()
    taken = [_around(*axes.transData.transform(point)) for point in points.values()]
    for method, point in points.items():
        color = BLUE if is_ours(method) else GRAY
        label = axes.annotate(
            *(method, point),
            xytext=(0, 0),
            textcoords="offset points",
            color=color,
            fontsize=9,
            parse_math=False,
        )
        for x, y in _PLACES:
            label.set(position=(x, y), ha="left" if x > 0 else "right" if x < 0 else "center")
            box = label.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(label.get_window_extent())


#: Where a label may be, in points from its point: near places first.
_PLACES = [(x, y) for far in range(1, 9) for y in (6 * far, -12 * far) for x in (6, -6, 0)]


def _around(x: float, y: float) -> Bbox:
    """The pixels of a point."""
    return Bbox([[x - 6, y - 6], [x + 6, y + 6]])


@matplotlib.rc_context(STYLE)
def plot_timeline(plan: Plan, path: Path, title: str) -> None:
    """Draws the memory of each part over the program's instructions, stacked."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    times, *parts = zip(*plan.timeline, strict=True)
    sizes = {
        name: [size / _GIB for size in part]
        for name, part in zip(PARTS, parts, strict=True)
        if max(part) > 1e-3 * plan.peak
    }
    axes.stackplot(
        times,
        *sizes.values(),
        labels=[name.replace("_", " ") for name in sizes],
        colors=[f"C{PARTS.index(name)}" for name in sizes],
        step="post",
        linewidth=0,
    )
    peak = max(plan.timeline, key=lambda row: sum(row[1:]))[0]
    axes.plot(peak, plan.peak / _GIB, "v", color=BLUE, label=f"peak {format_bytes(plan.peak)}")
    if plan.limit < 1.5 * plan.peak:
        axes.axhline(plan.limit / _GIB, color=GRAY, linestyle="--", linewidth=1, label="limit")
    axes.set(xlim=(times[0], max(times[-1], times[0] + 1)), ylim=0, ylabel="GiB on each device")
    axes.set_xlabel("instruction of the compiled program, in the order of its schedule")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    figure.savefig(path, dpi=150)


def pareto(comparison: Comparison) -> tuple[MethodPlan, ...]:
    """The methods that no other beats in both memory and time, the smallest peak first."""
    front: list[MethodPlan] = []
    for one in sorted(comparison, key=_memory_and_time):
        if not front or _memory_and_time(one)[1] < _memory_and_time(front[-1])[1]:
            front.append(one)
    return tuple(front)


def _memory_and_time(one: MethodPlan) -> tuple[float, float]:
    """The peak in GiB and the estimated time in milliseconds."""
    return one.plan.peak / _GIB, one.plan.estimated_seconds * 1e3


@matplotlib.rc_context(STYLE)
def plot_comparison(comparison: Comparison, path: Path, title: str) -> None:
    """Draws a point for each method, and a line through the methods of `pareto`."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    front = map(_memory_and_time, pareto(comparison))
    axes.plot(*zip(*front, strict=True), color=GRAY, linewidth=1, zorder=1)
    limit = comparison.budget / _GIB
    largest = max(_memory_and_time(one)[0] for one in comparison)
    if limit < 2 * largest:  # a larger limit would squeeze the points together
        axes.axvline(limit, color=GRAY, linestyle="--", linewidth=1, label="limit")
        axes.legend(loc="upper right", fontsize=9)
    axes.set(xlabel="peak, GiB on each device", ylabel="time of a step, ms (estimate)")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    draw_points(axes, {one.method: _memory_and_time(one) for one in comparison})
    figure.savefig(path, dpi=150)
