"""The measured tables of README.md and docs/, from the JSON files in `results/`.

`TABLES` maps the name in a marker to a function that returns rows of cells, the head first.
`readme_tables.py` writes the tables.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lowmembp_examples.benchmarks import compare, json_lines, quality_report
from lowmembp_examples.benchmarks.quality_report import FIDELITY_METHODS
from lowmembp_examples.benchmarks.report import Rows

RESULTS = Path(__file__).parent / "results"
MIB, GIB = 2**20, 2**30
#: Methods of `block_memory.json`: their names on the pages, and the parts that they recompute.
BLOCK_METHODS = {
    "default": ("Flax as it comes", "nothing"),
    "checkpointed norm and activation": ("`jax.checkpoint` around norm and GELU", "norm, GELU"),
    "dots policy": ("`jax.checkpoint`, dots policy", "norm, GELU, attention"),
    "products policy": ("`jax.checkpoint`, `lm.products_saveable`", "norm, GELU"),
    "full remat": ("`jax.checkpoint`, everything", "everything"),
    "compress": ("**`lm.compress`**", "norm, GELU"),
    "compress, attention in bfloat16": ("`lm.compress`, attention in bfloat16", "norm, GELU"),
    "lowmembp_jax": ("**the operators**", "**nothing**"),
    "compress, lowmembp_jax": (
        "the operators, in `lm.compress(policy=lm.everything_saveable)`",
        "nothing",
    ),
    "lowmembp_jax, its remat policy": (
        "the operators with `lm.checkpoint_policy()`",
        "products, attention, GELU",
    ),
}
#: Methods of `other_models.json`.
OTHER_MODELS = {
    "plain": "Flax as it comes",
    "dots policy": "dots policy",
    "products policy": "`lm.products_saveable`",
    "full remat": "full remat",
    "compress": "**`lm.compress`**",
    "compress, int8": "the same, int8",
    "compress of full remat": "inputs of blocks alone",
    "compress, everything_saveable": "`lm.everything_saveable`",
}
#: Methods of `finetune.json` and `nnx_finetune.json` whose names contain names of the library.
FINETUNED = {
    "lm.compress": "`lm.compress`",
    "lm.compress, inputs of layers alone": "`lm.compress`, inputs of layers alone",
    "lm.nnx.compress": "`lm.nnx.compress`",
    "lm.nnx operators": "`lm.nnx.MSLayerNorm`, `lm.gelu`",
}
#: Methods of `loss_memory.json`.
LOSSES = {
    "whole logits": "plain",
    "linear_cross_entropy": "`lm.linear_cross_entropy`",
    "whole logits, compress": "plain, `lm.compress`",
    "linear_cross_entropy, compress": "**`lm.linear_cross_entropy`, `lm.compress`**",
}
ACTIVATIONS = {
    "gelu_erf": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "softplus": "softplus",
    "elu": "ELU",
    "squared_relu": "squared ReLU",
}


def read(name: str) -> dict[str, Any]:
    """Reads one file of `results/`, by its name without ".json"."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def block_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of a ViT-B block with unrolled layers, by method and trained part."""
    rows = read("block_memory")["rows"]
    return {(r["method"], r["train"]): r for r in rows if r["layers"] == "unrolled"}


def block_memory() -> Rows:
    done = block_rows()
    rows = [["method", "full tuning", "LoRA on q, v", "LoRA on all Denses", "recomputes"]]
    for method, (name, recomputes) in BLOCK_METHODS.items():
        found = [done.get((method, train)) for train in ("full", "lora-qv", "lora-all")]
        cells = (
            f"{r['block_units']:.2f} ({r['peak_mib_12_blocks']:,.0f} MiB)" if r else ""
            for r in found
        )
        rows.append([name, *cells, recomputes])
    return rows


def block_cost() -> Rows:
    done = block_rows()
    head = ["method", "residuals, units a block", "peak of 12 blocks", "moved, units a block"]
    rows = [[*head, "kernels a block", "time (estimate)"]]
    for method, (name, _) in BLOCK_METHODS.items():
        row = done.get((method, "full"))
        if row and "moved_units_a_block" in row:
            kept, peak = f"{row['block_units']:.2f}", f"{row['peak_mib_12_blocks']:,.0f} MiB"
            moved = f"{row['moved_units_a_block']:.1f}", f"{row['kernels_a_block']:.0f}"
            time = row["estimated_ms_4_blocks"]
            ratio = time / done["default", "full"]["estimated_ms_4_blocks"]
            rows.append([name, kept, peak, *moved, f"{time:.2f} ms ({ratio:.2f})"])
    return rows


def fidelity_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Returns gradient errors by column of the tables, "start" or "trained", and method."""
    names = {"minilm": "MiniLM", "vit": "ViT", "llama": "LLaMA"}
    done = {}
    for row in json_lines.read(RESULTS / "gradient_fidelity.jsonl"):
        column = names[row["model"]] + ", SST-2" * row["data"].endswith(".tsv")
        done[column, row["when"], row["method"]] = row
    return done


def gradient_fidelity(*methods: str) -> Rows:
    """The relative error and cosine of a loss's gradient, at the start and after training."""
    done, sets = fidelity_rows(), ("MiniLM, SST-2", "MiniLM", "ViT", "LLaMA")
    rows = [["", *(cell for name in sets for cell in (name, f"{name}, trained"))]]
    for method in methods:
        found = (done[name, when, method] for name in sets for when in ("start", "trained"))
        cells = (f"{f['error']:.3f} ({f['cosine']:.4f})" for f in found)
        rows.append([FIDELITY_METHODS[method], *cells])
    return rows


def gradient_summary() -> Rows:
    """The gradient errors of a pretrained model on real text, for the README."""
    done = fidelity_rows()
    rows = [["gradients of MiniLM on SST-2", "error", "cosine", "after 200 steps", "cosine"]]
    for method in ("plain Flax in bfloat16", "compress", "operators, 2 bits", "operators, 4 bits"):
        numbers = (done["MiniLM, SST-2", when, method] for when in ("start", "trained"))
        cells = ((f"{n['error']:.1%}", f"{n['cosine']:.4f}") for n in numbers)
        rows.append([FIDELITY_METHODS[method], *chain(*cells)])
    return rows


def step_table_errors() -> Rows:
    columns = ("N(0, 0.5)", "N(0, 1)", "N(0, 2)", "MiniLM")
    done = read("step_tables")["rows"]
    rows = [["", "bits", *("N(0, 1/2)" if c == "N(0, 0.5)" else c for c in columns)]]
    for activation, name in ACTIVATIONS.items():
        for table, errors in done[activation].items():
            published = table == "published"
            cells = (f"{errors[c]:.3f}" if c in errors else "" for c in columns)
            rows.append([name + ", published" * published, "2" if published else table[0], *cells])
    return rows


def third_party(methods: dict[str, str]) -> Rows:
    """MiB and the ratio to plain. `methods` maps names in `third_party.py` to columns."""
    heads = ["plain", *methods.values()]
    trained = {"full": "full tuning", "LoRA": "LoRA"}
    rows = [["model", *(f"{train}: {head}" for train in trained.values() for head in heads)]]
    for model, row in read("third_party")["rows"].items():
        cells = []
        for train in trained:
            found = row[train]
            parts = (f"{found[m] / MIB:,.0f} ({found[m] / found['plain']:.2f})" for m in methods)
            cells += [f"{found['plain'] / MIB:,.0f}", *parts]
        rows.append([model, *cells])
    return rows


def storage_formats() -> Rows:
    """Gradient errors by input and format."""
    found = read("storage_formats")["rows"]
    formats = next(iter(found.values()))
    rows = [["gradient's relative error", *formats]]
    return rows + [[name, *(f"{e:.3f}" for e in errors.values())] for name, errors in found.items()]


def other_models() -> Rows:
    """The peak in MiB, estimated milliseconds, and the error of an approximate gradient."""
    rows = [["six blocks", *OTHER_MODELS.values()]]
    for kind, found in read("other_models")["rows"].items():
        cells = []
        for method in OTHER_MODELS:
            one = found[method]
            cell = f"{one['peak'] / MIB:,.0f}, {1e3 * one['estimated_seconds']:.2f}"
            cells.append(cell + (f", {one['error']:.1%}" if "error" in one else ""))
        rows.append([kind, *cells])
    return rows


def decisions() -> Rows:
    """The table that answers "which method?" on every page."""
    return [
        ["your case", "use", "what it costs"],
        [
            "`jax.checkpoint` around each block fits and is fast enough",
            "`jax.checkpoint`",
            "a second forward pass; gradients are exact",
        ],
        [
            "full tuning; LoRA or QLoRA on all Denses",
            "`lm.compress` around each block",
            "gradients 1 to 5% off; takes less time than a second forward pass",
        ],
        [
            "LoRA on query and value",
            "the operators inside `lm.compress(policy=lm.everything_saveable)`; "
            "in a LLaMA, `lm.compress`",
            "gradients about 5% off",
        ],
        [
            "only memory matters",
            "`lm.compress(policy=jax.checkpoint_policies.nothing_saveable)`",
            "a second forward pass; gradients 1 to 5% off",
        ],
        [
            "a large vocabulary",
            "`lm.linear_cross_entropy`",
            "nothing; gradients are exact",
        ],
        [
            "parameters and optimizer state do not fit",
            "`lm.compress_state`, `lm.master_weights`, `lm.update_in_backward`",
            "rounded optimizer state",
        ],
        [
            "a gated MLP of your own",
            "`lm.swiglu`, `lm.geglu`",
            "an elementwise product is computed twice; gradients are exact",
        ],
        [
            "a model that you cannot edit",
            "`lm.patch`",
            "as the method that it applies",
        ],
    ]


def optimizer_memory() -> Rows:
    """Peaks of full tuning, including the optimizer's state."""
    head = ["model", "optimizer state", "master weights", "update"]
    rows = [[*head, "state", "peak", "time (estimate)"]]
    for row in read("optimizer_memory")["rows"]:
        rows.append(
            [
                {"llama-1b": "LLaMA-1B", "llama-7b": "LLaMA-7B"}[row["model"]],
                row["optimizer_state"],
                row["master_weights"],
                row["update"],
                f"{row['parts']['optimizer_state'] / GIB:.2f} GiB",
                f"{row['peak'] / GIB:.2f} GiB",
                f"{1e3 * row['estimated_seconds']:.0f} ms",
            ]
        )
    return rows


def finetune(file: str) -> Rows:
    """The accuracy, loss and memory in an example's results.json."""
    result = read(file)
    runs, sizes = result["runs"], result["memory"]
    labels = (f"{s['batch']} x {s['tokens']} {s['dtype']}" for s in sizes)
    heads = (cell for label in labels for cell in (f"residuals, {label}", "H200 peak"))
    rows = [["method", "dev accuracy", "dev loss", *heads]]
    for method in sizes[0]["residual_bytes"]:
        done = runs.get(method, [])
        accuracy, loss = ([run[what] for run in done] for what in ("accuracy", "loss"))
        scores = ["", ""]
        if done:
            scores = [f"{statistics.mean(accuracy):.1%}", f"{statistics.mean(loss):.3f}"]
        counts = (size[part][method] for size in sizes for part in ("residual_bytes", "peak_bytes"))
        cells = (f"{count / MIB:,.0f} MiB" for count in counts)
        rows.append([FINETUNED.get(method, method), *scores, *cells])
    return rows


def loss_alone() -> Rows:
    """Temporaries, FLOPs and estimated time of the loss alone."""
    rows = [["loss", "gradients of", "temporaries", "TFLOP", "time (estimate)"]]
    for row in read("loss_memory")["alone"]:
        of = "hidden and kernel" if row["kernel_is_trained"] else "hidden, the kernel is frozen"
        size = f"{row['temporary_bytes'] / GIB:.2f} GiB"
        flops, time = f"{row['flops'] / 1e12:.2f}", f"{row['estimated_ms']:.1f} ms"
        rows.append([LOSSES[row["loss"]], of, size, flops, time])
    return rows


def loss_models() -> Rows:
    """The peak of a training step and its estimated time, by model."""
    done = read("loss_memory")["models"]
    methods = list(dict.fromkeys(row["method"] for row in done))
    rows = [["peak (time)", *(LOSSES[method] for method in methods)]]
    for model in dict.fromkeys(row["model"] for row in done):
        found = {row["method"]: row for row in done if row["model"] == model}
        cells = (
            f"{found[m]['peak_bytes'] / GIB:.2f} GiB ({found[m]['estimated_ms']:.0f} ms)"
            for m in methods
        )
        rows.append([model, *cells])
    return rows


def loss_curve() -> Rows:
    """The difference between the losses of trainings with tiled and with whole logits."""
    curve = read("loss_memory")["curve"]
    heads = ["small LLaMA, float32", "first loss", "last loss", "largest relative difference"]
    numbers = (f"{curve['first']:.3f}", f"{curve['last']:.3f}")
    difference = f"{curve['largest_relative_difference']:.1e}".replace("e-0", "e-")
    return [heads, [f"{curve['steps']} steps", *numbers, difference]]


def published(kind: str) -> Rows:
    """Published GPU measurements beside the planner's numbers, one row per quantity.

    Args:
      kind: "memory", "time" or "change", see `published.Case`.
    """
    is_change = kind == "change"
    heads = [*(["unit"] if not is_change else []), "published", "planned"]
    rows = [["step", "quantity", *heads, *([] if is_change else ["difference"]), "measured on"]]
    for row in read("published")["rows"]:
        if row["kind"] != kind:
            continue
        for quantity, measured in row["published"].items():
            planned = row["planned"][quantity]
            cells = [f"{measured:+.0f}%", f"{planned:+.0f}%"]
            if not is_change:
                cells = [row["unit"], f"{measured:,.4g}", f"{planned:,.4g}"]
                cells.append(f"{planned / measured - 1:+.1%}")
            rows.append([row["what"], quantity, *cells, f"{row['gpu']}, {row['source']}"])
    return rows


_ALL = tuple(FIDELITY_METHODS)
_STEPS = ("operators, 2 bits as published", "operators, 2 bits", "operators, 4 bits")
_COMPRESS = {"compress": "`lm.patch(compress=...)`", "compress, int8": "the same, int8"}
TABLES: dict[str, Callable[[], Rows]] = {
    "block_memory": block_memory,
    "block_cost": block_cost,
    "gradient_summary": gradient_summary,
    "compress_fidelity": partial(gradient_fidelity, *_ALL[:9], _ALL[-1]),
    "activation_fidelity": partial(gradient_fidelity, *_STEPS, "compress", "compress, int8"),
    "step_tables": step_table_errors,
    "third_party_operators": partial(third_party, {"operators": "`lm.patch()`"}),
    "third_party_compress": partial(third_party, _COMPRESS),
    "other_models": other_models,
    "storage_formats": storage_formats,
    "decisions": decisions,
    "optimizer_memory": optimizer_memory,
    "loss_alone": loss_alone,
    "loss_models": loss_models,
    "loss_curve": loss_curve,
    "finetune": partial(finetune, "finetune"),
    **{f"published_{kind}": partial(published, kind) for kind in ("memory", "time", "change")},
    "nnx_finetune": partial(finetune, "nnx_finetune"),
    **compare.TABLES,
    **quality_report.TABLES,
}
