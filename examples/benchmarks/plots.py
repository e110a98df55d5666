"""Draws the pictures in `docs/`: memory against a step's estimated time, one marker per method.

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
from lowmembp_examples.benchmarks import compare
from lowmembp_examples.benchmarks.measured_tables import block_rows
from lowmembp_examples.benchmarks.readme_tables import ROOT
from matplotlib.figure import Figure

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
MODELS = ("vit-b16", "bert-base", "llama-7b")
_OURS = ("lm.compress", "the operators")
_MARKERS = "os^vD*Pph<>X"
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
    return Picture(panels, time, "saved by a block [tokens x hidden x 2 bytes]")


def model_picture(model: str) -> Picture:
    """Returns a picture with a panel for the first two trained parts that have times."""
    done, panels = compare.read(), {}
    for train, trained in compare.TRAINED.items():
        points = {
            COMPARE_LABELS[method]: (
                round(1e3 * row["estimated_seconds"], 2),
                round(row["peak"] / compare.GIB, 3),
            )
            for method, row in done.get((model, train), {}).items()
            if method in COMPARE_LABELS and "estimated_seconds" in row
        }
        if len(points) == len(COMPARE_LABELS) and len(panels) < 2:
            panels[f"{compare.NAMES[model]}, {trained}"] = points
    time = "a training step, estimated for an H200 [ms]"
    return Picture(panels, time, "peak of all memory [GiB]")


def pictures() -> dict[Path, Picture]:
    """Returns all pictures by file: the blocks', and one per model."""
    folder = ROOT / "docs" / "compare"
    return {BLOCK: block_picture()} | {folder / f"{m}.svg": model_picture(m) for m in MODELS}


def draw(path: Path, picture: Picture) -> None:
    figure = Figure(figsize=(5.5 * len(picture.panels), 5.5), layout="constrained")
    labels = [*max(picture.panels.values(), key=len)]
    every = figure.subplots(1, len(picture.panels), sharey=True, squeeze=False)[0]
    for axes, (title, points) in zip(every, picture.panels.items(), strict=True):
        for label, point in points.items():
            # Filled and open markers differ without colour, too.
            ours = label.startswith(_OURS)
            style = {"marker": _MARKERS[labels.index(label)], "color": "C0" if ours else "dimgray"}
            axes.plot(*point, ls="", ms=9, mfc="C0" if ours else "white", label=label, **style)
        axes.set_ylim(bottom=0)
        axes.margins(0.15)
        axes.grid(alpha=0.3)
        axes.set_title(f"{title}: better is down and to the left", size=10)
    figure.supxlabel(picture.time, size=10)
    figure.supylabel(picture.memory, size=10)
    handles, names = every[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=9)
    # These settings save text as text, and give the same file in every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmembp_jax"}):
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": picture.description})


if __name__ == "__main__":
    for path, picture in pictures().items():
        draw(path, picture)
        print(f"written: {path.relative_to(ROOT)}")
