"""Plans as stacked bars: memory by part, a bar a method."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lowmembp_jax.memory.plan import PARTS, Plan
from lowmembp_jax.memory.sizes import format_bytes

# Told apart by hatching as well as by lightness, so that print and colour blindness do no harm.
_STYLE = dict(
    zip(
        PARTS,
        [
            *(("0.25", ""), ("0.45", "//"), ("0.6", ".."), ("0.7", "xx")),
            *(("0.95", ""), ("0.85", "--"), ("1.0", "oo")),
        ],
        strict=True,
    )
)


def plot_plans(plans: Mapping[str, Plan], path: Path, title: str, budget: int) -> None:
    """Writes a bar a method, its parts stacked, with a line at the budget.

    Args:
      plans: by method.
      path: of the image; its suffix is the format, one that matplotlib writes.
      title: above the bars.
      budget: bytes a device may use.
    """
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(plans)), layout="constrained")
    axes = figure.subplots()
    gib = 2**30
    start = dict.fromkeys(plans, 0.0)
    for part in PARTS:
        sizes = {method: getattr(plan, part) / gib for method, plan in plans.items()}
        if not any(sizes.values()):
            continue
        axes.barh(
            list(plans),
            list(sizes.values()),
            left=list(start.values()),
            label=part.replace("_", " "),
            facecolor=_STYLE[part][0],
            hatch=_STYLE[part][1],
            edgecolor="black",
            linewidth=0.7,
        )
        start = {method: start[method] + size for method, size in sizes.items()}
    for method, plan in plans.items():
        axes.annotate(
            f" {format_bytes(plan.peak)}", (start[method], method), va="center", fontsize=9
        )
    widest = max(start.values())
    if budget / gib < 2 * widest:  # further away, it would leave the bars no room
        axes.axvline(budget / gib, color="black", linestyle="--", label="budget")
        widest = max(widest, budget / gib)
    axes.set_xlim(0, 1.15 * widest)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each device")
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
