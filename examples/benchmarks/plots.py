"""Draws the pictures in `docs/`: memory against a step's estimated time, one point per method.

    python examples/benchmarks/plots.py

`block_memory.svg` shows the residuals of a ViT-B block with unrolled layers, from
`results/block_memory.json`. `compare/MODEL.svg` shows the peak of a model's whole training step on
an H200, from `results/compare.jsonl`. A picture's description repeats its points for a test. The
same results always give the same files.
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
#: No picture has "offload", because it takes five times as long and would stretch the scale.
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
#: Possible places of a label: its offset from its data point, in typographic points, and alignment.
_PLACES = [
    *((0, 6, "center", "bottom"), (0, -6, "center", "top")),
    *((7, 0, "left", "center"), (-7, 0, "right", "center")),
    *((-4, 6, "left", "bottom"), (4, 6, "right", "bottom")),
    *((-4, -6, "left", "top"), (4, -6, "right", "top")),
]
_ROUNDS = 5  # rounds in which labels make room for each other
#: Milliseconds and memory, by label.
Points = dict[str, tuple[float, float]]


class Picture(NamedTuple):
    """A picture: the points by the title of their panel, and the labels of the axes."""

    panels: dict[str, Points]
    time: str
    memory: str

    @property
    def description(self) -> str:
        return json.dumps(self.panels)


def block_picture() -> Picture:
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
    """Returns a picture with panels for the first two entries of `TRAINED` with times."""
    done, panels = compared(), {}
    for train, trained in TRAINED.items():
        points = {
            COMPARE_LABELS[method]: (
                round(1e3 * row["estimated_seconds"], 2),
                round(row["peak"] / GIB, 3),
            )
            for method, row in done.get((model, train), {}).items()
            if method in COMPARE_LABELS and "estimated_seconds" in row
        }
        if len(points) > 5 and len(panels) < 2:
            panels[f"{COMPARED[model]}, {trained}"] = points
    time = "a training step, estimated for an H200 [ms]"
    return Picture(panels, time, "peak of all memory [GiB]")


def pictures() -> dict[Path, Picture]:
    """Returns all pictures by file: the blocks', and one per model with estimated times."""
    models = [model for model in COMPARED if model_picture(model).panels]
    folder = ROOT / "docs" / "compare"
    return {BLOCK: block_picture()} | {folder / f"{m}.svg": model_picture(m) for m in models}


def draw(path: Path, picture: Picture) -> None:
    figure = Figure(figsize=(5.5 * len(picture.panels), 5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    most = max(memory for points in picture.panels.values() for _, memory in points.values())
    every = figure.subplots(1, len(picture.panels), sharey=True, squeeze=False)[0]
    for axes, (title, points) in zip(every, picture.panels.items(), strict=True):
        for label, point in points.items():
            # Filled circles and open squares differ without colour, too.
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
    figure.set_layout_engine("none")  # The labels depend on the current layout.
    for axes, points in zip(every, picture.panels.values(), strict=True):
        _label(axes, points, canvas)
    # These settings save text as text, and give the same file in every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmembp_jax"}):
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": picture.description})


def _label(axes: Axes, points: Points, canvas: FigureCanvasAgg) -> None:
    """Puts each label beside its point, where it overlaps points and other labels the least."""
    markers = [
        Bbox.from_bounds(x - 6, y - 6, 12, 12)
        for x, y in (axes.transData.transform(point) for point in points.values())
    ]
    texts = {
        label: axes.annotate(
            label,
            point,
            (0, 0),
            textcoords="offset points",
            size=8,
            weight="bold" if label.startswith(_OURS) else "normal",
        )
        for label, point in points.items()
    }

    def put(label: str, place: tuple[int, int, str, str]) -> Bbox:
        x, y, horizontal, vertical = place
        texts[label].set(position=(x, y), ha=horizontal, va=vertical)
        return texts[label].get_window_extent(canvas.get_renderer())

    boxes = {label: [put(label, place) for place in _PLACES] for label in texts}

    def covered(label: str, chosen: dict[str, int]) -> float:
        box = boxes[label][chosen[label]]
        others = [boxes[other][i] for other, i in chosen.items() if other != label]
        outside = max(axes.bbox.x0 - box.x0, box.x1 - axes.bbox.x1, 0) * box.height
        return outside + sum(_common(box, other) for other in (*markers, *others))

    def settled(start: int) -> dict[str, int]:
        chosen = dict.fromkeys(texts, start)
        for _ in range(_ROUNDS):
            for label in texts:
                tried = ({label: place} for place in range(len(_PLACES)))
                chosen |= min(tried, key=lambda one: covered(*one, chosen | one))
        return chosen

    every = map(settled, range(len(_PLACES)))
    best = min(every, key=lambda chosen: sum(covered(label, chosen) for label in texts))
    for label, place in best.items():
        put(label, _PLACES[place])


def _common(a: Bbox, b: Bbox) -> float:
    """Returns the area that two boxes share."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0.0) * max(height, 0.0)


if __name__ == "__main__":
    for path, picture in pictures().items():
        draw(path, picture)
        print(f"written: {path.relative_to(ROOT)}")
