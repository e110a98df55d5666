"""Draws the memory and the time of several methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lowmembp_jax.memory.comparison import Comparison, MethodPlan

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
    centers = map(axes.transData.transform, points.values())
    taken = [Bbox([[x - 6, y - 6], [x + 6, y + 6]]) for x, y in centers]
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


def _memory_and_time(one: MethodPlan) -> tuple[float, float]:
    """The peak in GiB and the estimated time in milliseconds."""
    return one.plan.peak / _GIB, one.plan.estimated_seconds * 1e3


@matplotlib.rc_context(STYLE)
def plot_comparison(comparison: Comparison, path: Path, title: str) -> None:
    """Draws a point for each method, and the limit if it is near."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    limit = comparison.budget / _GIB
    largest = max(_memory_and_time(one)[0] for one in comparison)
    if limit < 2 * largest:  # a larger limit would squeeze the points together
        axes.axvline(limit, color=GRAY, linestyle="--", linewidth=1, label="limit")
        axes.legend(loc="upper right", fontsize=9)
    axes.set(xlabel="peak, GiB on each device", ylabel="time of a step, ms (estimate)")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    draw_points(axes, {one.method: _memory_and_time(one) for one in comparison})
    figure.savefig(path, dpi=150)
