"""Draws memory against the estimated time of a step, a point a method: the pictures in `docs/`.

    python examples/benchmarks/plots.py

`block_memory.svg` has what a ViT-B block with unrolled layers keeps, from
`results/block_memory.json`; `compare/MODEL.svg` the peak of a model's whole training step on an
H200, from `results/compare.jsonl`. A picture's points are in its description too, where a test
reads them; nothing in it differs from run to run.
"""

import json
from pathlib import Path
from typing import NamedTuple

import matplotlib
from lowmembp_examples.benchmarks.compare_tables import GIB, compared
from lowmembp_examples.benchmarks.measured_tables import block_rows
from lowmembp_examples.benchmarks.readme_tables import ROOT
from lowmembp_examples.benchmarks.table_names import COMPARED, TRAINED
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

BLOCK = ROOT / "docs" / "block_memory.svg"
BLOCK_LABELS = {
    "default": "Flax as it comes",
    "dots policy": "dots policy",
    "products policy": "lm.products_saveable",
    "full remat": "full remat",
    "compress": "lm.compress",
    "compress, attention in bfloat16": "lm.compress, attention in bf16",
    "lowmembp_jax": "the operators, 2 bits",
}
#: "offload" is in no picture: with five times the time it would be all of the scale.
COMPARE_LABELS = {
    "default": "Flax as it comes",
    "norm+activation": "norm, activation checkpointed",
    "dots": "dots policy",
    "products": "lm.products_saveable",
    "full-remat": "full remat",
    "mesa": "Mesa, int8",
    "compress": "lm.compress",
    "compress+remat": "lm.compress of full remat",
    "lowmembp": "the operators, 2 bits",
    "lowmembp+remat": "the operators, remat",
    "lowmembp+compress": "lm.compress of the operators",
}
_OURS = ("lm.compress", "the operators")
#: Where a label may stand, in points from its own point: the first place that is free.
_PLACES = [
    *((0, 6, "center", "bottom"), (0, -6, "center", "top")),
    *((7, 0, "left", "center"), (-7, 0, "right", "center")),
    *((5, 9, "left", "bottom"), (-5, 9, "right", "bottom")),
    *((5, -9, "left", "top"), (-5, -9, "right", "top")),
]
#: Milliseconds and memory, by label.
Points = dict[str, tuple[float, float]]


class Picture(NamedTuple):
    """What is drawn: points by the title of their panel, and what the axes are."""

    panels: dict[str, Points]
    time: str
    memory: str

    @property
    def description(self) -> str:
        return json.dumps(self.panels)


def block_picture() -> Picture:
    """Of the methods that have an estimate."""
    done, panels = block_rows(), {}
    for train, title in {"full": "ViT-B, full tuning", "lora-qv": "ViT-B, LoRA on q, v"}.items():
        rows = {label: done.get((m, train), {}) for m, label in BLOCK_LABELS.items()}
        panels[title] = {
            label: (row["estimated_ms_4_blocks"], row["block_units"])
            for label, row in rows.items()
            if "estimated_ms_4_blocks" in row
        }
    time = "forward and backward of 4 blocks, estimated for an H200 [ms]"
    return Picture(panels, time, "kept a block [tokens x hidden x 2 bytes]")


def model_picture(model: str) -> Picture:
    """The two first of what is trained."""
    done, panels = compared(), {}
    for train in [train for train in TRAINED if (model, train) in done][:2]:
        panels[f"{COMPARED[model]}, {TRAINED[train]}"] = {
            COMPARE_LABELS[method]: (
                round(1e3 * row["estimated_seconds"], 2),
                round(row["peak"] / GIB, 3),
            )
            for method, row in done[model, train].items()
            if method in COMPARE_LABELS
        }
    return Picture(
        panels, "a training step, estimated for an H200 [ms]", "peak of all memory [GiB]"
    )


def pictures() -> dict[Path, Picture]:
    """By file."""
    models = dict.fromkeys(model for model, _ in compared())
    folder = ROOT / "docs" / "compare"
    return {BLOCK: block_picture()} | {folder / f"{m}.svg": model_picture(m) for m in models}


def draw(path: Path, picture: Picture) -> None:
    figure = Figure(figsize=(5 * len(picture.panels), 4.4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    most = max(memory for points in picture.panels.values() for _, memory in points.values())
    every = figure.subplots(1, len(picture.panels), sharey=True, squeeze=False)[0]
    for axes, (title, points) in zip(every, picture.panels.items(), strict=True):
        for label, point in points.items():
            # Told apart without colour, too: filled circles, and open squares.
            style = {"marker": "s", "color": "dimgray", "mfc": "white"}
            if label.startswith(_OURS):
                style = {"marker": "o", "color": "C0"}
            axes.plot(*point, **style)
        axes.set_ylim(0, 1.1 * most)
        axes.margins(x=0.25)
        axes.grid(alpha=0.3)
        axes.set_title(f"{title}: better is down and to the left", size=10)
    figure.supxlabel(picture.time, size=10)
    figure.supylabel(picture.memory, size=10)
    canvas.draw()
    figure.set_layout_engine("none")  # the labels are put where things are now
    for axes, points in zip(every, picture.panels.values(), strict=True):
        _label(axes, points, canvas)
    # Text as text, and nothing that differs from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmembp_jax"}):
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": picture.description})


def _label(axes: Axes, points: Points, canvas: FigureCanvasAgg) -> None:
    """Names each point beside it, where there is room."""
    taken = [
        Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for x, y in (axes.transData.transform(point) for point in points.values())
    ]
    for label, point in points.items():
        weight = "bold" if label.startswith(_OURS) else "normal"
        best = None
        for x, y, horizontal, vertical in _PLACES:
            text = axes.annotate(
                label, point, (x, y), textcoords="offset points", size=8, weight=weight
            )
            text.set(ha=horizontal, va=vertical)
            box = text.get_window_extent(canvas.get_renderer())
            covered = box.count_overlaps(taken) + (not axes.bbox.fully_containsx(box.x0))
            covered += not axes.bbox.fully_containsx(box.x1)
            if best is None or covered < best[0]:
                if best:
                    best[1].remove()
                best = covered, text, box
            else:
                text.remove()
        if best:
            taken.append(best[2])


if __name__ == "__main__":
    for path, picture in pictures().items():
        draw(path, picture)
        print(f"written: {path.relative_to(ROOT)}")
