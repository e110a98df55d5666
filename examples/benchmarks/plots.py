"""Draws `docs/block_memory.svg`: what a block keeps against the estimated time of a step.

    python examples/benchmarks/plots.py

A point a method, from `results/block_memory.json`: a ViT-B block with unrolled layers, all of it
trained and LoRA. The points are in the picture's description too, where a test reads them.
"""

import json
from pathlib import Path

import matplotlib
from lowmembp_examples.benchmarks.measured_tables import block_rows
from lowmembp_examples.benchmarks.readme_tables import ROOT
from matplotlib.figure import Figure

OUTPUT = ROOT / "docs" / "block_memory.svg"
PANELS = {"full": "ViT-B, full tuning", "lora-qv": "ViT-B, LoRA on q, v"}
LABELS = {
    "default": "Flax as it comes",
    "dots policy": "dots policy",
    "products policy": "lm.products_saveable",
    "full remat": "full remat",
    "compress": "lm.compress",
    "compress, attention in bfloat16": "lm.compress, attention in bf16",
    "lowmembp_jax": "the operators, 2 bits",
}
#: Its label would be in another's way above the point.
BELOW = {"dots policy"}
OURS = {"compress", "compress, attention in bfloat16", "lowmembp_jax"}


def points(train: str) -> dict[str, tuple[float, float]]:
    """Milliseconds as estimated and units kept, of the methods that have both."""
    done = block_rows()
    rows = {method: done[method, train] for method in LABELS if (method, train) in done}
    return {
        method: (row["estimated_ms_4_blocks"], row["block_units"])
        for method, row in rows.items()
        if "estimated_ms_4_blocks" in row
    }


def description() -> str:
    return json.dumps({train: points(train) for train in PANELS})


def draw(path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (train, title) in zip(
        figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True
    ):
        for method, (milliseconds, units) in points(train).items():
            ours = method in OURS
            # Told apart without colour: filled, and open.
            axes.plot(milliseconds, units, "o", color="black", mfc="black" if ours else "white")
            axes.annotate(
                LABELS[method],
                (milliseconds, units),
                xytext=(0, -13 if method in BELOW else 6),
                textcoords="offset points",
                ha="center",
                size=8,
                weight="bold" if ours else "normal",
            )
        axes.set_ylim(0, 22)
        axes.margins(x=0.25)
        axes.grid(alpha=0.3)
        axes.set_title(f"{title}: better is down and to the left", size=10)
    figure.supxlabel("forward and backward of 4 blocks, estimated for an H200 [ms]", size=10)
    figure.supylabel("kept a block [tokens x hidden x 2 bytes]", size=10)
    # Text as text, and nothing that differs from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmembp_jax"}):
        figure.savefig(path, metadata={"Date": None, "Description": description()})


if __name__ == "__main__":
    draw(OUTPUT)
    print(f"written: {OUTPUT.relative_to(ROOT)}")
