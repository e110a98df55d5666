"""Plans full tuning of LLaMA with 8-bit optimizer state and 24-bit master weights.

    python examples/benchmarks/optimizer_memory.py

plans a step for an H100 (bfloat16, `compress+remat`, 4 x 2,048 tokens) with float32 and compressed
state, at the end and with an update of each layer inside the backward pass. You need no GPU. It
writes `results/optimizer_memory.json` after each plan, and prints the table of docs/optimizer.md.
"""

import itertools
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from results import FOLDER, GIB, markdown, versions, write_json
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.workload import MODELS

OUTPUT = FOLDER / "optimizer_memory.json"
DEVICE = "h100"
NAMES = ("llama-1b", "llama-7b")
#: Options of the planner's models, and their values in each row.
OPTIONS = ("optimizer", "optimizer_state", "master_weights", "update")
CHOICES = (
    *(
        ("adamw", *bits, "end")
        for bits in itertools.product(("float32", "8bit"), ("float32", "24bit"))
    ),
    ("adamw", "8bit", "24bit", "backward"),
    ("adamw", "8bit", "16bit", "backward"),
    ("adafactor", "float32", "16bit", "backward"),
)


def step(model: str, *options: str) -> dict[str, Any]:
    """Plans a step; `options` are the values of `OPTIONS`."""
    given = dict(zip(OPTIONS, options, strict=True))
    work = MODELS[model](batch=4, method="compress+remat", device=DEVICE, **given)
    plan = lm.memory.plan(work.step, *work.args, device=DEVICE, donate=work.donate_argnums)
    return {
        "model": model,
        **given,
        "peak": plan.peak,
        "parts": {part: getattr(plan, part) for part in lm.memory.PARTS},
        "estimated_seconds": plan.cost.estimated_seconds,
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    results = {"device": DEVICE, "versions": versions(), "rows": rows}
    for model, choice in tqdm([*itertools.product(NAMES, CHOICES)], unit="plan"):
        rows.append(step(model, *choice))
        write_json(OUTPUT, results)
    cells = [["model", *OPTIONS, "peak", "time (estimate)"]]
    for one in rows:
        time = f"{1e3 * one['estimated_seconds']:.0f} ms"
        own = [one[key] for key in ("model", *OPTIONS)]
        cells.append([*own, f"{one['peak'] / GIB:.2f} GiB", time])
    print(markdown(cells))


if __name__ == "__main__":
    main()
