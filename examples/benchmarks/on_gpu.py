"""Checks and measures what needs a GPU, and writes one file of results.

    python examples/benchmarks/on_gpu.py --output results/gpu --device h200

needs this checkout and `jax` with CUDA. Each job runs in its own process:

    kernels/IMPLEMENTATION    every kernel's values and gradients, against float64
    measure/MODEL/METHOD      peak memory and time of a training step; needs --device
    plan/MODEL/METHOD         the planner's numbers for the same step

The program writes `on_gpu.json` in --output after each job. Start it again with the same --output
to run the jobs that are missing or failed. `--smoke` runs tiny sizes on a CPU. Exit status 0 means
that everything ran and passed.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from results import MIB, markdown, versions, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
IMPLEMENTATIONS = ("pallas", "triton", "xla")
#: The steps: names of models, the batch and the tokens. The most informative come first.
STEPS = {
    "llama-1b": {"batch": 8, "tokens": 2048},
    "vit-b16": {"batch": 64},
    "bert-base": {"batch": 64, "tokens": 128},
    "swin-t": {"batch": 64},
}
METHODS = ("default", "compress", "dots", "full-remat", "lowmembp", "lowmembp+compress")
#: In float32, whose attention runs on a CPU.
SMOKE = {"llama-tiny": {"batch": 2, "tokens": 32, "dtype": "float32"}}
#: Bounds of norm(result - reference) / norm(reference), and of the largest difference of one
#: element over the largest element of the reference. A bfloat16 result is rounded to 2^-9.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}


def kernels(implementation: str, smoke: bool):
    """Yields a record for each kernel and dtype."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import lowmembp_jax as lm

    own, width = partial, 64 if smoke else 768
    operators = {  # the number of arrays [rows, width], and of parameters [width]
        "gelu_tanh": (lm.gelu, 1, 0),
        "gelu_tanh, 4 bits": (own(lm.gelu, bits=4), 1, 0),
        "gelu_erf": (own(lm.gelu, approximate=False), 1, 0),
        "silu": (lm.silu, 1, 0),
        "layer_norm": (own(lm.ms_layer_norm, residual="normalized"), 1, 2),
        "layer_norm, saves its output": (own(lm.ms_layer_norm, residual="output"), 1, 2),
        "rms_norm": (own(lm.ms_rms_norm, residual="normalized"), 1, 1),
        "rms_norm, saves its output": (own(lm.ms_rms_norm, residual="output"), 1, 1),
        "swiglu": (lm.swiglu, 2, 0),
        "geglu_tanh": (lm.geglu, 2, 0),
        "geglu_erf": (own(lm.geglu, approximate=False), 2, 0),
    }

    def run(operator, poison, cotangent, *arrays):  # writes over the donated `poison`
        y, backward = jax.vjp(operator, *arrays)
        return [y, *backward(cotangent)]

    def differences(got, want):
        for one, exact in zip(got, want, strict=True):
            exact = np.asarray(exact, np.float64)
            off = np.asarray(one).astype(np.float64) - exact
            yield np.linalg.norm(off) / np.linalg.norm(exact), abs(off).max() / abs(exact).max()

    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng, rows = np.random.default_rng(seed), 16 if smoke else 253
    for name, (operator, count, parameters) in operators.items():
        for dtype, bounds in TOLERANCES.items():
            # x reaches every threshold of the step tables; scales are in 1 to 3.
            drawn = [4 * rng.normal(size=(rows, width)) for _ in range(count + 1)]
            arrays = [jnp.asarray(x, dtype) for x in drawn]
            scales = [2 + np.tanh(rng.normal(size=width)) for _ in range(parameters)]
            arrays += [jnp.asarray(x, jnp.float32) for x in scales]
            with jax.enable_x64(True):
                exact = [jnp.asarray(np.asarray(x).astype(np.float64)) for x in arrays]
                want = jax.jit(partial(run, partial(operator, implementation="xla"), ()))(*exact)
            ours = partial(run, partial(operator, implementation=implementation))
            poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in arrays]
            got = jax.jit(ours, donate_argnums=0, keep_unused=True)(poison, *arrays)
            errors = np.max([*differences(got, want)], axis=0).tolist()
            passed = bool(np.all(np.array(errors) <= bounds))  # NaN exceeds every bound
            record = {"kernel": name, "dtype": dtype, "seed": seed}
            yield record | {"errors": errors, "passed": passed}


def _workload(model: str, method: str, device: str):
    from lowmembp_jax.models.workload import MODELS

    sizes = SMOKE.get(model) or STEPS[model]
    return MODELS[model](**sizes, method=method, device=device)


def plan(model: str, method: str, device: str):
    """Yields the planner's numbers."""
    import lowmembp_jax as lm

    work = _workload(model, method, device)
    planned = lm.memory.plan(work.step, *work.args, device=device, donate=work.donate_argnums)
    yield {"peak": planned.peak, "estimated_seconds": planned.cost.estimated_seconds}


def measure(model: str, method: str, device: str, smoke: bool):
    """Yields the memory and the time of the step on JAX's default device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    work = _workload(model, method, device)
    step = jax.jit(work.step, donate_argnums=work.donate_argnums)
    lowered, began = step.lower(*work.args), time.perf_counter()
    compiled = lowered.compile()  # before the arguments take memory
    compile_seconds = time.perf_counter() - began
    drawn = 0.02 * np.random.default_rng(0).standard_normal(1_000_003, "float32")

    inputs = work.args[2].inputs[0]

    def is_integer(like):
        return jnp.issubdtype(like.dtype, jnp.integer)

    def array(path, like):
        name = jax.tree_util.keystr(path)
        if like.shape == inputs.shape:  # tokens, or images; a hot row of a table would be slow
            values = np.resize(np.arange(1000) if is_integer(like) else drawn, like.shape)
        elif is_integer(like):  # lengths of texts, labels, or counts
            is_length = name.startswith("[2].inputs")
            values = np.full(like.shape, inputs.shape[1] if is_length else name.startswith("[2]"))
        elif "scale" in name and name.startswith("[0]"):
            values = np.ones(like.shape)
        else:
            values = np.zeros(like.shape) if name.startswith("[1]") else np.resize(drawn, like.shape)
        return jax.device_put(values.astype(like.dtype))  # compiles nothing

    params, state, batch = jax.tree_util.tree_map_with_path(array, work.args)
    gpu, sizes = jax.devices()[0], compiled.memory_analysis()
    before, losses = gpu.memory_stats(), []
    for _ in range(2):
        start = time.perf_counter()
        params, state, loss = jax.block_until_ready(compiled(params, state, batch))
        losses.append(float(loss))
    calls = 1 if smoke else math.ceil(0.5 / (time.perf_counter() - start))
    peak = (gpu.memory_stats() or {}).get("peak_bytes_in_use")
    is_hidden = peak is not None and peak <= before["peak_bytes_in_use"]  # compiling took more
    times = []
    for _ in range(1 if smoke else 7):
        start = time.perf_counter()
        for _ in range(calls):
            params, state, loss = compiled(params, state, batch)
        jax.block_until_ready(loss)
        times.append((time.perf_counter() - start) / calls)
    yield {
        "peak": None if is_hidden else peak,
        "program_temporaries": sizes.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
        "losses": losses,
        "passed": all(map(math.isfinite, losses)),
        "seconds": statistics.median(times),
    }


def run_job(name: str, device: str | None, smoke: bool) -> list[dict[str, Any]]:
    """Returns a job's records; runs in the job's own process."""
    stage, _, rest = name.partition("/")
    if smoke or stage == "plan":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if stage == "kernels":
        return [*kernels(rest, smoke)]
    model, _, method = rest.partition("/")
    if stage == "plan":
        return [*plan(model, method, device or "h200")]
    return [*measure(model, method, device or "h200", smoke)]


def start(*job: Any) -> dict[str, Any]:
    """Runs a job in a process; returns its status and its records."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return {"status": "done", "records": pool.submit(run_job, *job).result()}
        except Exception as error:  # also a process that died
            return {"status": f"failed: {type(error).__name__}: {error}"[:300], "records": []}


def tables(done: dict[str, Any]) -> str:
    """The checks by implementation, and the planned and measured steps."""
    checks = [["implementation", "kernels passed", "largest relative error"]]
    steps = [["training step", "planned MiB", "measured MiB", "estimated ms", "measured ms"]]
    for name, job in done.items():
        stage, _, rest = name.partition("/")
        records = job["records"]
        if stage == "kernels" and records:
            passed = f"{sum(one['passed'] for one in records)} of {len(records)}"
            checks.append([rest, passed, f"{max(one['errors'][0] for one in records):.1e}"])
        planned = done.get(f"plan/{rest}", {}).get("records")
        if stage == "measure" and records and planned:
            (one,), (other,) = records, planned
            peak = f"{one['peak'] / MIB:,.0f}" if one["peak"] else "unknown"
            own = [f"{other['peak'] / MIB:,.0f}", peak, f"{1e3 * other['estimated_seconds']:.1f}"]
            steps.append([rest, *own, f"{1e3 * one['seconds']:.1f}"])
    return "\n".join(markdown(rows) for rows in (checks, steps) if rows[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", help="this GPU's name in `lowmembp devices`")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args()
    steps, methods = (SMOKE, METHODS[:2]) if options.smoke else (STEPS, METHODS)
    implementations = ("pallas_interpret",) if options.smoke else IMPLEMENTATIONS
    names = [f"kernels/{name}" for name in implementations]
    for stage in ("measure", "plan") if options.device or options.smoke else ():
        names += [f"{stage}/{model}/{method}" for model in steps for method in methods]
    path = options.output / "on_gpu.json"
    results = json.loads(path.read_text()) if path.exists() else {"jobs": {}}
    results |= {"versions": versions(), "device": options.device}
    results["command"] = " ".join(["python", *sys.argv])
    done = results["jobs"]
    for name in names:
        if done.get(name, {}).get("status") == "done":
            continue
        began = time.monotonic()
        done[name] = start(name, options.device, options.smoke)
        write_json(path, results)
        print(f"{name}: {done[name]['status']}, {time.monotonic() - began:.1f} s", flush=True)
    print(tables(done))
    failed = [name for name in names if done[name]["status"] != "done"]
    records = [(name, record) for name in names for record in done[name]["records"]]
    wrong = [f"{name}: {record}" for name, record in records if not record.get("passed", True)]
    print(*wrong, *(f"failed: {name}" for name in failed), sep="\n")
    print(f"{len(names) - len(failed)} of {len(names)} done, {len(wrong)} wrong: {path}")
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main())
