"""Trains a LLaMA on the sources of Python packages with each method, and draws the losses.

    python examples/benchmarks/training_gpu.py GPU  # 123 million parameters, or CPU: 2.9 million

All methods see the same batches from the same initial parameters. After each training, and each
plan for an H200, the script writes `results/training_gpu.json`, from which a restart continues.
Without a GPU, "GPU" only plans. `pip install -e ".[test]"` for Python 3.11 installs the packages
whose sources are the text. On a CPU, seconds are CPU seconds, because others may share the cores.
"""

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from results import FOLDER, GIB, markdown, versions, write_json

from lowmembp_jax.memory.plot import BLUE, GRAY, STYLE
from lowmembp_jax.models.decoder_configs import LlamaConfig

FILE = FOLDER / "training_gpu.json"
PICTURE = Path(__file__).parents[2] / "docs" / "compare" / "training.svg"
DOTS = "`dots_saveable`"
#: The method in `models.methods.TABLE`, whether state and parameters are rounded, and the line.
METHODS = {
    "plain": ("default", False, GRAY, 5),
    DOTS: ("dots", False, "#2da44e", 3.5),
    "`lm.compress`": ("compress", False, BLUE, 2),
    "`lm.compress`, 8-bit state, 16-bit parameters": ("compress", True, "#d97706", 1),
}
_PACKAGES = ("jax", "matplotlib", "networkx", "numpy", "scipy", "sympy", "torch", "transformers")


Scale = namedtuple("Scale", "title config packages methods dtype batch tokens steps")
_SMALL = LlamaConfig(256, 3, 4, 704, vocab_size=2048, tie_word_embeddings=True)
_LARGE = LlamaConfig(768, 12, 12, 2048, vocab_size=24576)
SCALES = {
    "GPU": Scale("123M, GPU", _LARGE, _PACKAGES, {*METHODS}, "bfloat16", 16, 1024, 3000),
    "CPU": Scale(
        "2.9M, CPU", _SMALL, ("jax", "numpy"), {*METHODS} - {DOTS}, "float32", 4, 128, 2000
    ),
}


def run(name: str, method: str, part: str) -> dict[str, Any]:
    """Plans or trains one method; runs in its own process."""
    if part == "planned" or name == "CPU":
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from data import Batch, Dataset, TrainingBatches, evaluation_batches, package_tokens
    from training import init_state, learning_rate, make_loss, make_optimizer, make_step

    import lowmembp_jax as lm
    from lowmembp_jax.models import FAMILIES, Compute

    scale, (layers, is_rounded, *_) = SCALES[name], METHODS[method]
    dtype, fewer = "float32", {}
    if is_rounded:
        dtype, fewer = "bfloat16", {"is_8bit": True, "master_bits": 16}
    kernel = "cudnn" if name == "GPU" else "xla"
    compute = Compute(layers, *map(jax.numpy.dtype, (scale.dtype, dtype)), kernel)
    model = FAMILIES["llama"].build(scale.config, compute)
    optimizer = make_optimizer(learning_rate(1e-3, scale.steps, 0.05), weight_decay=0.1, **fewer)
    loss = make_loss("language-modelling", model)
    step = jax.jit(make_step(loss, optimizer), donate_argnums=0)
    ids = np.zeros((scale.batch, scale.tokens), np.int32)
    params = lambda key: model.init(key, ids)["params"]  # noqa: E731
    init = jax.jit(lambda key: init_state(params(key), optimizer, scale.dtype, dtype))
    if part == "planned":
        state = jax.eval_shape(init, jax.random.key(0))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Batch((ids,), ids))
        return {"planned": lm.memory.plan(step, state, {}, batch, device="h200").peak}
    if name == "GPU" and jax.default_backend() == "cpu":
        return {}
    cache = Path("results/training_gpu") / f"{name}.npz"
    ids_of_text = package_tokens(scale.packages, scale.config.vocab_size, cache)
    cut = lambda x, i: x[i : i + (len(x) - 1) // scale.tokens * scale.tokens]  # noqa: E731
    parts = [[cut(x, i).reshape(-1, scale.tokens) for i in (0, 1)] for x in ids_of_text]
    known, held_out = (Dataset((inputs,), labels) for inputs, labels in parts)
    batches, totals = TrainingBatches(known, scale.batch, 0), jax.jit(lambda *x: loss(*x)[1])
    clock = time.process_time if name == "CPU" else time.perf_counter
    state, curve, seconds = init(jax.random.key(0)), [], 0.0
    step = step.lower(state, {}, batches.at(0)).compile()
    for done in range(0, scale.steps + 1, 100):
        few = itertools.islice(evaluation_batches(held_out, scale.batch), 16)
        sums = np.sum([jax.device_get(totals(state.params, {}, x)) for x in few], 0, np.float64)
        curve.append([done, seconds, float(sums[0] / sums[1])])
        began = clock()
        for number in range(done, min(done + 100, scale.steps)):
            state, _ = step(state, {}, batches.at(number))
        jax.block_until_ready(state)
        seconds += clock() - began
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    found = {"tokens_a_second": scale.steps * ids.size / seconds, "measured": peak, "curve": curve}
    return found | {"text": known.labels.size, "device": jax.devices()[0].device_kind}


@rc_context(STYLE)
def report(runs: dict[str, Any]) -> None:
    """Prints the table, and draws the loss against steps and seconds, a row for each scale."""
    rows = [["model", "method", "GiB planned", "measured", "tokens a second", "held-out loss"]]
    drawn = [name for name, done in runs.items() if any("curve" in one for one in done.values())]
    figure = Figure(figsize=(10, 3.6 * len(drawn)), layout="constrained")
    panels = dict(zip(drawn, figure.subplots(len(drawn), 2, squeeze=False), strict=True))
    for name, method, one in ((key, *item) for key in runs for item in runs[key].items()):
        cells, curve = ["not run", "not run", "not run"], np.array(one.get("curve", []))
        if curve.size:
            peak = f"{one['measured'] / GIB:.2f}" if one["measured"] else "no GPU"
            cells = [peak, f"{one['tokens_a_second']:,.0f}", f"{curve[-1, 2]:.3f}"]
        rows.append([SCALES[name].title, method, f"{one['planned'] / GIB:.3f}", *cells])
        for column, axes in enumerate(panels[name] if curve.size else ()):
            line = dict(zip(("color", "linewidth"), METHODS[method][2:], strict=True))
            axes.plot(curve[:, column], curve[:, 2], label=method.replace("`", ""), **line)
            seconds = "CPU seconds" if name == "CPU" else "seconds"
            axes.set(xlabel=("steps", seconds)[column], ylabel="loss on held-out text")
            axes.set_title(SCALES[name].title, fontsize=10)
            axes.legend(fontsize=8)
    print(markdown(rows))
    figure.savefig(PICTURE, metadata={"Date": None})


def main(name: str) -> None:
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else {}
    own = runs.setdefault(name, {one: {} for one in METHODS if one in SCALES[name].methods})
    for method, part in itertools.product(own, ("planned", "curve")):
        if part not in own[method]:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                own[method] |= pool.submit(run, name, method, part).result()
            packages = {package: version(package) for package in SCALES[name].packages}
            command = f"python examples/benchmarks/training_gpu.py {name}"
            own[method] |= {"command": command, "versions": versions() | packages}
            write_json(FILE, {"versions": versions(), "runs": runs})
    report(runs)


if __name__ == "__main__":
    main(sys.argv[1])
