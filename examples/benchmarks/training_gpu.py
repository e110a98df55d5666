"""Trains a LLaMA on the sources of Python packages with each method, and draws the losses.

    python examples/benchmarks/training_gpu.py GPU  # 123 million parameters, or CPU: 2.9 million

All methods see the same batches from the same parameters. A restart continues
`results/training_gpu.json`; without a GPU, "GPU" only plans. The text is packages that
`pip install -e ".[test]"` installs for Python 3.11. On a CPU, seconds are CPU seconds.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

# The imports start no GPU. Only the processes of the methods do.
import jax
import numpy as np
from data import Batch, TrainingBatches, evaluation_batches, package_sources
from matplotlib import rc_context
from matplotlib.figure import Figure
from results import FOLDER, GIB, markdown, save, versions
from training import evaluate, init_state, learning_rate, make_loss, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.memory.plot import BLUE, GRAY, STYLE
from lowmembp_jax.models import FAMILIES, Compute
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
Scale = namedtuple("Scale", "title config packages methods dtype batch tokens steps")
_SMALL = LlamaConfig(256, 3, 4, 704, vocab_size=2048, tie_word_embeddings=True)
_LARGE = LlamaConfig(768, 12, 12, 2048, vocab_size=24576)
_TEXT = ("jax", "numpy", "matplotlib", "networkx", "scipy", "sympy", "torch", "transformers")
SCALES = {
    "GPU": Scale("123M, GPU", _LARGE, _TEXT, {*METHODS}, "bfloat16", 16, 1024, 3000),
    "CPU": Scale("2.9M, CPU", _SMALL, _TEXT[:2], {*METHODS} - {DOTS}, "float32", 4, 128, 2000),
}


def read() -> dict[str, Any]:
    """Returns what is known by scale and method."""
    return json.loads(FILE.read_text())["runs"] if FILE.exists() else {}


def record(name: str, method: str, **found: Any) -> None:
    """Adds results of one method to the file, with versions."""
    runs = read()
    packages = {package: version(package) for package in SCALES[name].packages}
    found["versions"] = versions() | packages
    runs.setdefault(name, {}).setdefault(method, {}).update(found)
    save("training_gpu", runs=runs)


def run(name: str, method: str, part: str) -> None:
    """Plans or trains one method; runs in its own process."""
    if part == "planned" or name == "CPU":
        jax.config.update("jax_platforms", "cpu")
    scale, (layers, is_rounded, *_) = SCALES[name], METHODS[method]
    dtype = "bfloat16" if is_rounded else "float32"
    fewer = {"is_8bit": True, "master_bits": 16} if is_rounded else {}
    dtypes = map(jax.numpy.dtype, (scale.dtype, dtype))
    compute = Compute(layers, *dtypes, "cudnn" if name == "GPU" else "xla")
    optimizer = make_optimizer(learning_rate(1e-3, scale.steps, 0.05), weight_decay=0.1, **fewer)
    loss = make_loss("language-modelling", FAMILIES["llama"].build(scale.config, compute))
    step = jax.jit(make_step(loss, optimizer), donate_argnums=0)
    ids = np.zeros((scale.batch, scale.tokens), np.int32)
    draw = FAMILIES["llama"].build(scale.config, Compute()).init  # float32 for every method
    init = jax.jit(lambda key: init_state(draw(key, ids)["params"], optimizer, scale.dtype, dtype))
    if part == "planned":
        state = jax.eval_shape(init, jax.random.key(0))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Batch((ids,), ids))
        peak = lm.memory.plan(step, state, {}, batch, device="h200").peak
        return record(name, method, planned=peak)
    if name == "GPU" and jax.default_backend() == "cpu":
        return
    where = scale.config.vocab_size, scale.tokens, Path(f"results/training_gpu/{name}.npz")
    known, held_out = package_sources(scale.packages, *where)
    batches, totals = TrainingBatches(known, scale.batch, 0), jax.jit(lambda *x: loss(*x)[1])
    clock = time.process_time if name == "CPU" else time.perf_counter
    state, curve, seconds = init(jax.random.key(0)), [], 0.0
    step = step.lower(state, {}, batches.at(0)).compile()
    for done in range(0, scale.steps + 1, 100):
        few = itertools.islice(evaluation_batches(held_out, scale.batch), 16)
        curve.append([done, seconds, evaluate(partial(totals, state.params, {}), few)["loss"]])
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        found = {"curve": curve, "measured": peak, "text": known.labels.size}
        found["tokens_a_second"] = done * ids.size / max(seconds, 1e-9)
        record(name, method, device=jax.devices()[0].device_kind, **found)
        began = clock()
        for number in range(done, min(done + 100, scale.steps)):
            state, _ = step(state, {}, batches.at(number))
        jax.block_until_ready(state)
        seconds += clock() - began


@rc_context(STYLE)
def report(runs: dict[str, Any]) -> None:
    """Prints the table, and draws the loss against steps and seconds, a row for each scale."""
    rows, trained = [], ("GiB measured", "tokens a second", "steps", "loss")
    drawn = [name for name, done in runs.items() if any("curve" in one for one in done.values())]
    figure = Figure(figsize=(10, 3.6 * len(drawn)), layout="constrained")
    panels = dict(zip(drawn, figure.subplots(len(drawn), 2, squeeze=False), strict=True))
    for name, method, one in ((key, *item) for key in runs for item in runs[key].items()):
        row = {"model": SCALES[name].title, "method": method, "GiB planned": one["planned"] / GIB}
        row, curve = {**row, **dict.fromkeys(trained, "not run")}, np.array(one.get("curve", []))
        if curve.size:
            peak = one["measured"] / GIB if one["measured"] else "no GPU"
            last = (peak, one["tokens_a_second"], curve[-1][0], curve[-1][2])
            row |= zip(trained, last, strict=True)
        rows.append(row)
        for column, axes in enumerate(panels[name] if curve.size else ()):
            line = dict(zip(("color", "linewidth"), METHODS[method][2:], strict=True))
            axes.plot(curve[:, column], curve[:, 2], label=method.replace("`", ""), **line)
            axes.set(xlabel=("steps", f"seconds of the {name}")[column], ylabel="held-out loss")
            axes.legend(title=SCALES[name].title, fontsize=8)
    print(markdown(rows))
    figure.savefig(PICTURE, metadata={"Date": None})


def main(name: str) -> None:
    for method, part in itertools.product(METHODS, ("planned", "curve")):
        known = read().get(name, {}).get(method, {}).get(part)
        is_done = known and (part == "planned" or known[-1][0] == SCALES[name].steps)
        if method in SCALES[name].methods and not is_done:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                pool.submit(run, name, method, part).result()
    report(read())


if __name__ == "__main__":
    main(sys.argv[1])
