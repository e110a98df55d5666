"""Draws plans: the memory of one plan over the program, and memory and time of several methods."""

from pathlib import Path

from matplotlib.figure import Figure

from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.memory.comparison import Comparison, MethodPlan
from lowmembp_jax.memory.result import PARTS, Plan

_GIB = 2**30


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
    axes.plot(peak, plan.peak / _GIB, "kv", label=f"peak {format_bytes(plan.peak)}")
    if plan.limit < 1.5 * plan.peak:
        axes.axhline(plan.limit / _GIB, color="black", linestyle="--", linewidth=1, label="limit")
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


def plot_comparison(comparison: Comparison, path: Path, title: str) -> None:
    """Draws a point for each method, and a line through the methods of `pareto`."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    front = pareto(comparison)
    axes.plot(*zip(*map(_memory_and_time, front), strict=True), color="0.6", linewidth=1, zorder=1)
    for one in comparison:
        memory, time = _memory_and_time(one)
        face = "black" if one in front else "white"
        axes.scatter(memory, time, facecolor=face, edgecolor="black", zorder=2)
        place = {"xytext": (5, 5), "textcoords": "offset points"}
        axes.annotate(one.method, (memory, time), **place, fontsize=9, parse_math=False)
    limit = comparison.budget / _GIB
    largest = max(_memory_and_time(one)[0] for one in comparison)
    if limit < 2 * largest:  # a larger limit would squeeze the points together
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="limit")
        axes.legend(loc="upper right", fontsize=9)
    axes.margins(0.15)
    axes.set(xlabel="peak, GiB on each device", ylabel="time of a step, ms (estimate)")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
