"""Compares the planner with memory and times that others measured on GPUs.

    python examples/benchmarks/published.py

plans each configuration of `CASES` and writes `results/published.json` after each case. After an
interruption, start it again to continue; `--again` starts from the beginning. You need no GPU. It
takes 5 minutes on 2 cores. `readme_tables.py` writes the tables of docs/validation.md.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tyro
from lowmembp_examples.benchmarks import published_steps as steps
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.stages import versions
from tqdm import tqdm

OUTPUT = Path(__file__).parent / "results" / "published.json"

_NOTEBOOK = "[JAX's notebook](https://github.com/jax-ml/jax/pull/28988)"
_TE = (
    "[TransformerEngine](https://github.com/NVIDIA/TransformerEngine/blob/main/docs/examples/"
    "gemm_profiling/gemm_profiling.rst)"
)
_XLA = "[XLA](https://github.com/openxla/xla/pull/45753)"
_PAPER = "[LowMemoryBP](https://arxiv.org/abs/2406.16282)"
_TOOLBOX = (
    "[JAX-Toolbox](https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/"
    "README.md)"
)
_MAXTEXT = (
    "[MaxText](https://github.com/AI-Hypercomputer/maxtext/blob/"
    "30cd40a5c8ed02519ddb77682e3ca72b8724f927/MaxText/configs/a3/llama_2_7b/README.md)"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration with published measurements.

    Attributes:
      kind: the table of this case: "memory", "time" or "change".
      what: a description of the measured step.
      gpu: the GPU of the measurement; "GPU" if the source does not name it.
      source: a link.
      unit: the unit of the numbers.
      published: the published numbers, by quantity.
      plan: plans the same quantities, and others.
      planned_for: one of `lm.memory.DEVICES`.
    """

    kind: str
    what: str
    gpu: str
    source: str
    unit: str
    published: dict[str, float]
    plan: Callable[[], dict[str, float]]
    planned_for: str

    def row(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        planned = fields.pop("plan")()
        return fields | {"planned": planned}


def _notebook(what: str, unit: str, published: tuple[float, float, float], plan) -> Case:
    numbers = dict(zip(("temporaries", "arguments", "peak"), published, strict=True))
    plan = partial(plan, "a100-80gb")
    return Case("memory", what, "GPU", _NOTEBOOK, unit, numbers, plan, "a100-80gb")


def _paper(what: str, gpu: str, published: dict[str, float], model: str, **options: Any) -> Case:
    plan = partial(steps.against_checkpointed, model, **options)
    return Case("change", what, gpu, _PAPER, "%", published, plan, "h200")


CASES = (
    _notebook(
        "scan of 10 layers, gradient",
        "MiB",
        (17.25, 20.25, 57.50),
        partial(steps.scan_of_layers, offload=False),
    ),
    _notebook(
        "the same, activations on the host",
        "MiB",
        (6.50, 20.25, 46.75),
        partial(steps.scan_of_layers, offload=True),
    ),
    _notebook(
        "4 layers of 7,168 x 7,168, Adam",
        "GiB",
        (2.11, 2.49, 4.59),
        partial(steps.adam, offload=False),
    ),
    _notebook(
        "the same, Adam's state on the host",
        "GiB",
        (1.91, 0.96, 2.87),
        partial(steps.adam, offload=True),
    ),
    Case(
        "memory",
        "Llama 3-8B, 131,072 tokens over 8 GPUs, scanned layers",
        "8 x H200",
        _XLA,
        "GB",
        {"temporaries": 62.0},
        partial(steps.llama_context_parallel, "scan"),
        "h200",
    ),
    Case(
        "memory",
        "the same, unrolled, without the latency-hiding scheduler",
        "8 x H200",
        _XLA,
        "GB",
        {"temporaries": 65.0},
        partial(steps.llama_context_parallel, "unrolled"),
        "h200",
    ),
    Case(
        "time",
        "Llama 2-7B, 2 x 4,096 tokens a GPU, FSDP 8",
        "8 x H100",
        _TOOLBOX,
        "s",
        {"step": 0.721},
        partial(steps.llama_fsdp, 2),
        "h100",
    ),
    Case(
        "time",
        "Llama 2-7B, 4 x 4,096 tokens a GPU, FSDP 8",
        "8 x H100",
        _MAXTEXT,
        "TFLOP/s",
        {"TFLOP/s": 492.0},
        partial(steps.llama_fsdp, 4),
        "h100",
    ),
    Case(
        "time",
        "4 products of a layer, 15,872 tokens, 4,096 and 16,384 features",
        "H200 NVL",
        _TE,
        "ms",
        {
            "forward": 10.653,
            "gradient of the input": 10.813,
            "gradient of the weights": 10.548,
        },
        partial(steps.layer_products, "h200-nvl"),
        "h200-nvl",
    ),
    Case(
        "time",
        "4 products of a layer, 15,872 tokens, 4,096 and 16,384 features",
        "B300",
        _TE,
        "ms",
        {"forward": 4.196, "gradient of the input": 4.290, "gradient of the weights": 4.272},
        partial(steps.layer_products, "b300"),
        "b300",
    ),
    _paper(
        "ViT-B, LoRA on q, v, rank 4, 64 images",
        "PyTorch",
        {"peak": -27.0, "intermediates": -39.47, "time": 0.0, "time of Mesa": 20.0},
        "vit-b16",
        train="lora-qv",
        rank=4,
        batch=64,
    ),
    _paper(
        "RoBERTa-base, LoRA on two Denses, rank 64, 32 x 256 tokens, float32",
        "PyTorch",
        {"peak": -21.0},
        "roberta-base",
        train="lora-qv",
        rank=64,
        batch=32,
        tokens=256,
        dtype="float32",
    ),
    _paper(
        "LLaMA-7B, QLoRA on all Denses, rank 64, 4 x 640 tokens",
        "PyTorch",
        {"peak": -29.0, "intermediates": -29.19},
        "llama-7b",
        train="qlora-all",
        rank=64,
        batch=4,
        tokens=640,
    ),
)


def main(again: bool = False) -> None:
    """Plans the steps that others measured.

    Args:
      again: ignore the results in the file.
    """
    results: dict[str, Any] = {"rows": []}
    if OUTPUT.exists() and not again:
        before = json.loads(OUTPUT.read_text(encoding="utf-8"))
        if before.get("versions") == versions():  # other versions need other plans
            results = before
    results["command"] = " ".join(["python", "examples/benchmarks/published.py", *sys.argv[1:]])
    results["versions"] = versions()
    done = {(row["what"], row["gpu"]) for row in results["rows"]}
    for case in tqdm(CASES, unit="case"):
        if (case.what, case.gpu) not in done:
            results["rows"].append(case.row())
            write_json(OUTPUT, results)
    for row in results["rows"]:
        for quantity, published in row["published"].items():
            planned = row["planned"][quantity]
            print(f"{row['what']}, {quantity}: {published:g} {row['unit']}, planned {planned:.4g}")


if __name__ == "__main__":
    tyro.cli(main)
