"""Compares methods that save memory on whole training steps of real models.

    python examples/benchmarks/compare.py

XLA compiles the step (AdamW, bfloat16, float32 parameters) for an H200. You need no GPU. The script
writes `results/compare.json` after each step; plans are cached, so it starts where it was stopped.
Then it prints the table of docs/models.md and draws the picture in `docs/compare/`. A step takes
some 90 seconds on 2 cores. For other GPUs and sizes use `lowmembp plan`, for measurements on a GPU
`on_gpu.py`.
"""

import os
import sys
from pathlib import Path
from typing import Any

# This script must not take memory of a GPU on which others measure.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import lora
import matplotlib
from matplotlib.figure import Figure
from results import GIB, markdown, save
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.memory.plot import STYLE, draw_points
from lowmembp_jax.models.methods import USUAL

DEVICE = "h200"
PICTURE = Path(__file__).parents[2] / "docs" / "compare" / "methods.svg"
#: The steps and methods of the picture, and how it calls them.
SHOWN = {
    "ViT-B/16, 64, full": "ViT-B/16, 64 images, full tuning, on an H200",
    "LLaMA-1B, 8 x 2048, full": "LLaMA-1B, 8 x 2,048 tokens, full tuning, on an H200",
}
LABELS = {
    "default": "plain JAX",
    "dots": "dots_saveable",
    "full-remat": "jax.checkpoint",
    "compress": "lm.compress",
    "compress+remat": "lm.compress(policy=None)",
}

#: The model, what is trained, the batch and the tokens of each step.
STEPS = {
    "ViT-B/16, 64, full": ("vit-b16", "full", 64, None),
    "ViT-B/16, 64, LoRA q, v": ("vit-b16", "lora-qv", 64, None),
    "ViT-L/16, 64, full": ("vit-l16", "full", 64, None),
    "Swin-T, 64, full": ("swin-t", "full", 64, None),
    "BERT-base, 64 x 128, full": ("bert-base", "full", 64, 128),
    "BERT-base, 64 x 128, LoRA q, v": ("bert-base", "lora-qv", 64, 128),
    "LLaMA-1B, 8 x 2048, full": ("llama-1b", "full", 8, 2048),
    "LLaMA-1B, 8 x 2048, LoRA, all Denses": ("llama-1b", "lora-all", 8, 2048),
    "LLaMA-7B, 4 x 2048, full": ("llama-7b", "full", 4, 2048),
    "LLaMA-7B, 4 x 2048, LoRA q, v": ("llama-7b", "lora-qv", 4, 2048),
    "LLaMA-7B, 4 x 2048, QLoRA, all Denses": ("llama-7b", "qlora-all", 4, 2048),
    "Llama 3-8B, 1 x 8192, full": ("llama-3-8b", "full", 1, 8192),
}


def plans(step: str) -> dict[str, Any]:
    """Returns the peak and the estimated seconds of the compiled step, by method."""
    model, train, *sizes = STEPS[step]
    found = lm.memory.compare(
        lambda method, _: lora.workload(model, train, method, *sizes), USUAL, device=DEVICE
    )
    return {
        one.method: {"peak": one.plan.peak, "estimated_seconds": one.plan.estimated_seconds}
        for one in found
    }


@matplotlib.rc_context(STYLE)
def draw(steps: dict[str, Any]) -> None:
    """Draws the peak against the time, a panel for each of two steps."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (step, title) in zip(figure.subplots(1, 2), SHOWN.items(), strict=True):
        found = steps[step]
        points = {
            label: (found[method]["peak"] / GIB, 1e3 * found[method]["estimated_seconds"])
            for method, label in LABELS.items()
        }
        axes.set_title(title, size=10)
        draw_points(axes, points, from_zero=True)
    figure.supxlabel("peak of all memory [GiB]", size=10)
    figure.supylabel("a training step, estimated [ms]", size=10)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    steps, rows = {}, []
    for step in tqdm(STEPS, unit="step"):
        steps[step] = plans(step)
        save("compare", device=DEVICE, steps=steps)
        cells = {
            method: f"{one['peak'] / GIB:.2f} GiB, {1e3 * one['estimated_seconds']:.1f} ms"
            for method, one in steps[step].items()
        }
        rows.append({"model, batch, trained": step, **cells})
    print(markdown(rows))
    draw(steps)


if __name__ == "__main__":
    main()
