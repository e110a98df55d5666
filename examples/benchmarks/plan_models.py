"""What fine-tuning the models at their real sizes takes of a GPU, with each method; no GPU needed.

    python examples/benchmarks/plan_models.py

plans the trainer's step (AdamW, bfloat16, float32 master weights) of each model for an H200 and
writes `results/plan_models.json` after each method; started again, it goes on.
Two hours on 2 cores. Beside the peak stand bytes moved and FLOPs, from the compiled
program, and the estimated time.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from itertools import product

from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.benchmarks.validate_configurations import SIZES
from lowmembp_examples.planning import MODELS

import lowmembp_jax as lm

OUTPUT = Path(__file__).parent / "results" / "plan_models.json"
DEVICE = "h200"


def trained_parts(model: str) -> tuple[str, ...]:
    return ("lora-qv", "qlora-all") if model.startswith("llama") else ("full", "lora-qv")


def row(model: str, train: str, method: str) -> dict:
    batch, tokens = SIZES[model]
    factory = MODELS[model]
    work = factory(method=method, batch=batch, train=train, tokens=tokens, device=DEVICE)
    [one] = lm.memory.compare(lambda *_: work, (method,), batch=batch, device=DEVICE)
    return {
        "model": model,
        "train": train,
        "method": method,
        "batch": batch,
        "tokens": tokens,
        "peak": one.plan.peak,
        "parts": {part: getattr(one.plan, part) for part in lm.memory.PARTS},
        "bytes_moved": one.plan.cost.bytes_moved,
        "flops": one.plan.cost.flops,
        "estimated_seconds": one.plan.cost.estimated_seconds,
    }


def cells(done: list[dict]) -> list[list[str]]:
    out = [["peak in GiB (and against default)", *lm.memory.METHODS]]
    peaks = {(r["model"], r["train"], r["method"]): r["peak"] for r in done}
    for model, train in dict.fromkeys((r["model"], r["train"]) for r in done):
        default = peaks[model, train, "default"]
        own = (peaks.get((model, train, method)) for method in lm.memory.METHODS)
        numbers = (
            f"{peak / 2**30:.2f} ({peak / default - 1:+.0%})" if peak else "" for peak in own
        )
        out.append([f"{model}, {train}", *numbers])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    methods = lm.memory.METHODS
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    arguments = parser.parse_args()
    done = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else []
    for model in arguments.models:
        for train, method in product(trained_parts(model), arguments.methods):
            if any((r["model"], r["train"], r["method"]) == (model, train, method) for r in done):
                continue
            done.append(row(model, train, method))
            result = {
                "command": "python examples/benchmarks/plan_models.py",
                "device": DEVICE,
                "compiled_only": True,
                "versions": versions(),
                "rows": done,
            }
            write_json(OUTPUT, result)
    print(table(cells(done)))


if __name__ == "__main__":
    main()
