"""Checks and measures what needs a GPU, and writes one file of results.

    python examples/benchmarks/on_gpu.py --output results/gpu --device h200

needs this checkout and `jax` with CUDA. Each job runs in its own process:

    measure/MODEL/METHOD      peak memory and time of a training step
    kernels/IMPLEMENTATION    every kernel's values and gradients, against float64
    alone/WHAT                the times of an implementation's operators, of losses, of optimizers
    plan/MODEL/METHOD         the planner's numbers for the same step; uses no GPU

The program writes `on_gpu.json` in --output after each job. Start it again with the same --output
to run the jobs that are missing or failed. `--smoke` runs tiny sizes on a CPU. Exit status 0 means
that everything ran and passed. With JAX_COMPILATION_CACHE_DIR, the jobs share what XLA's autotuner
finds, and take a third of the time.
"""

import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# The imports start no GPU. Only the jobs' processes do.
import jax
import jax.numpy as jnp
import memory_tables
import numpy as np
import optax
import tyro
from results import GIB, MIB, markdown, versions, write_json

import lowmembp_jax as lm
from lowmembp_jax.models.workload import MODELS, make_optimizer

IMPLEMENTATIONS = ("pallas", "triton", "xla")
#: The steps: names of models, the batch and the tokens.
STEPS = {
    "vit-b16": {"batch": 64},
    "bert-base": {"batch": 64, "tokens": 128},
    "swin-t": {"batch": 64},
    "llama-1b": {"batch": 8, "tokens": 2048},
}
#: The step of `--smoke`, in float32, whose attention runs on a CPU.
SMOKE = {"llama-tiny": {"batch": 2, "tokens": 32, "dtype": "float32"}}
#: The most informative first, because a session may end early. A method is followed by the
#: operators' implementation, if it is not XLA's.
METHODS = ("default", "compress", "dots", "lowmembp", "full-remat", "lowmembp+compress")
METHODS += ("compress+remat", "lowmembp, pallas", "lowmembp, triton", "offload")
METHODS += ("compress+remat+offload",)
#: Bounds of norm(result - reference) / norm(reference), and of the largest difference of one
#: element over the largest element of the reference. A bfloat16 result is rounded to 2^-9.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}


def operators() -> dict[str, tuple[Callable[..., Any], int, int]]:
    """Operators, and how many arrays [rows, width] and parameters [width] they take."""
    return {
        "gelu_tanh": (lm.gelu, 1, 0),
        "gelu_tanh, 4 bits": (partial(lm.gelu, bits=4), 1, 0),
        "gelu_erf": (partial(lm.gelu, approximate=False), 1, 0),
        "silu": (lm.silu, 1, 0),
        "layer_norm": (partial(lm.ms_layer_norm, residual="normalized"), 1, 2),
        "layer_norm, saves its output": (partial(lm.ms_layer_norm, residual="output"), 1, 2),
        "rms_norm": (partial(lm.ms_rms_norm, residual="normalized"), 1, 1),
        "rms_norm, saves its output": (partial(lm.ms_rms_norm, residual="output"), 1, 1),
        "swiglu": (lm.swiglu, 2, 0),
        "geglu_tanh": (lm.geglu, 2, 0),
        "geglu_erf": (partial(lm.geglu, approximate=False), 2, 0),
    }


def kernels(implementation: str, smoke: bool):
    """Yields a record for each kernel and dtype."""

    def run(operator, poison, cotangent, *arrays):  # writes over the donated `poison`
        y, backward = jax.vjp(operator, *arrays)
        return [y, *backward(cotangent)]

    def differences(got, want):
        for one, exact in zip(got, want, strict=True):
            exact = np.asarray(exact, np.float64)
            off = np.asarray(one).astype(np.float64) - exact
            yield np.linalg.norm(off) / np.linalg.norm(exact), abs(off).max() / abs(exact).max()

    rng, (rows, width) = np.random.default_rng(0), (16, 64) if smoke else (253, 768)
    for name, (operator, count, parameters) in operators().items():
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
            yield {"kernel": name, "dtype": dtype, "errors": errors, "passed": passed}


def _workload(model: str, method: str, device: str):
    sizes = (STEPS | SMOKE)[model]
    return MODELS[model](**sizes, method=method.partition(", ")[0], device=device)


def plan(model: str, method: str, device: str):
    """Yields the planner's numbers."""
    work = _workload(model, method, device)
    planned = lm.memory.plan(work.step, *work.args, device=device, donate=work.donate_argnums)
    yield {"peak": planned.peak, "estimated_seconds": planned.cost.estimated_seconds}


def measure(model: str, method: str, device: str, smoke: bool):
    """Yields the memory and the time of the step on JAX's default device."""
    work = _workload(model, method, device)
    step = jax.jit(work.step, donate_argnums=work.donate_argnums)
    with lm.set_implementation(method.partition(", ")[2] or None):
        compiled = step.lower(*work.args).compile()  # before the arguments take memory
    inputs = work.args[2].inputs[0]

    def array(path, like):
        name, is_integer = jax.tree_util.keystr(path), jnp.issubdtype(like.dtype, jnp.integer)
        if like.shape == inputs.shape and is_integer:  # every token is as often as any other
            return put(like, np.arange(1000))
        if is_integer:  # lengths of texts, labels, or counts
            is_length = name.startswith("[2].inputs")
            return put(like, inputs.shape[1] if is_length else name.startswith("[2]"))
        if name.startswith("[1]"):
            return put(like, 0)
        return put(like, 1 if "scale" in name and name.startswith("[0]") else 0.02 * NORMAL)

    *state, batch = jax.tree_util.tree_map_with_path(array, work.args)
    gpu = jax.devices()[0]
    before = gpu.memory_stats()

    def once():
        *state[:], loss = compiled(*state, batch)
        return loss

    losses = [float(once()), float(once())]
    peak = (gpu.memory_stats() or {}).get("peak_bytes_in_use")
    is_hidden = peak is not None and peak <= before["peak_bytes_in_use"]  # compiling took more
    yield {
        "peak": None if is_hidden else peak,
        "losses": losses,
        "passed": all(map(math.isfinite, losses)),
        "seconds": seconds(once, smoke),
    }


#: Normal random numbers.
NORMAL = np.random.default_rng(0).standard_normal(1_000_003, "float32")


def put(like: Any, values: Any) -> Any:
    """Makes an array of values that repeat, without compiling anything."""
    return jax.device_put(np.resize(values, like.shape).astype(like.dtype))


def seconds(run: Callable[[], Any], smoke: bool) -> float:
    """Returns the median time of `run` in 7 rounds of half a second."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    calls = 1 if smoke else math.ceil(0.5 / (time.perf_counter() - start))
    times = []
    for _ in range(1 if smoke else 7):
        start, last = time.perf_counter(), None
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def alone(what: str, smoke: bool):
    """Yields the times of parts of a training step by themselves, in bfloat16."""

    def array(*shape, dtype=jnp.bfloat16, deviation=1.0):
        return put(jax.ShapeDtypeStruct(shape, dtype), deviation * NORMAL)

    if what in IMPLEMENTATIONS:
        for name, (operator, count, parameters) in operators().items():
            rows, width = (64, 128) if smoke else (50432, 768 if parameters else 3072)
            arrays = [array(rows, width) for _ in range(count)]
            arrays += [array(width, dtype=jnp.float32) for _ in range(parameters)]
            forward = jax.jit(partial(jax.vjp, partial(operator, implementation=what)))
            y, pullback = forward(*arrays)
            backward = partial(jax.jit(lambda pullback, y: pullback(y)), pullback, y)
            record = {"name": name, "forward_seconds": seconds(partial(forward, *arrays), smoke)}
            yield record | {"backward_seconds": seconds(backward, smoke)}
    if what == "losses":
        for losses, sizes in (
            (memory_tables.cross_entropies(), memory_tables.LARGE),
            (memory_tables.OF_TOKENS, memory_tables.REINFORCEMENT),
        ):
            tokens, features, vocab = (64, 32, 500) if smoke else sizes
            labels = jnp.arange(tokens, dtype=jnp.int32) * 7919 % vocab
            args = array(tokens, features), array(features, vocab, deviation=0.02), labels
            for (name, loss), is_trained in itertools.product(losses.items(), (True, False)):
                argnums = (0, 1) if is_trained else 0
                step = jax.jit(jax.value_and_grad(loss, argnums)).lower(*args).compile()
                record = {"name": name, "kernel_is_trained": is_trained}
                record["program_temporaries"] = step.memory_analysis().temp_size_in_bytes
                yield record | {"seconds": seconds(partial(step, *args), smoke)}
    if what == "optimizers":
        for is_8bit, bits in itertools.product((False, True), ("float32", "24bit", "16bit")):
            optimizer = make_optimizer(is_8bit=is_8bit, master_weights=bits, clips=False)
            dtype = jnp.float32 if bits == "float32" else jnp.bfloat16
            shapes = [(2, 64, 64)] if smoke else 3 * [(16, 2048, 8192)] + 4 * [(16, 2048, 2048)]
            params = [array(*shape, dtype=dtype, deviation=0.02) for shape in shapes]
            grads = [array(*shape, dtype=dtype, deviation=0.002) for shape in shapes]
            state = [params, jax.jit(optimizer.init)(params)]
            del params

            @partial(jax.jit, donate_argnums=(0, 1))
            def update(params, state, grads, optimizer=optimizer):
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            def once(state=state, grads=grads, update=update):
                state[:] = update(*state, grads)
                return state

            yield {"is_8bit": is_8bit, "master_weights": bits, "seconds": seconds(once, smoke)}
            state.clear()


def run_job(job: Callable[[], Iterator[Any]], on_cpu: bool) -> list[dict[str, Any]]:
    """Returns a job's records; runs in the job's own process."""
    if on_cpu:
        jax.config.update("jax_platforms", "cpu")
    return [*job()]


def start(*job: Any) -> dict[str, Any]:
    """Runs a job in a process; returns its status and its records."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return {"status": "done", "records": pool.submit(run_job, *job).result()}
        except Exception as error:  # also a process that died
            return {"status": f"failed: {type(error).__name__}: {error}"[:300], "records": []}


def tables(done: dict[str, Any]) -> str:
    """The checks, the planned and measured steps, and the times of parts of a step."""

    def records(stage: str) -> list[tuple[str, Any]]:
        jobs = [(name.removeprefix(stage), job["records"]) for name, job in done.items()]
        return [(name, one) for name, found in jobs if name not in done for one in found]

    def beside(unit: str, scale: float, planned: float | None, measured: float | None):
        both = {"planned": planned, "measured": measured}
        cells = {f"{unit} {key}": x / scale if x else "unknown" for key, x in both.items()}
        off = f"{100 * (planned / measured - 1):+.0f}%" if all(both.values()) else "unknown"
        return cells | {f"difference in {unit}": off}

    checks, steps, operators, losses, optimizers = [], [], [], [], []
    for name in dict.fromkeys(name for name, _ in records("kernels/")):
        own = [one for other, one in records("kernels/") if other == name]
        passed = f"{sum(one['passed'] for one in own)} of {len(own)}"
        worst = max(one["errors"][0] for one in own)
        checks.append({"implementation": name, "kernels passed": passed, "largest error": worst})
    for name, one in records("measure/"):
        plan = (done.get(f"plan/{name}", {}).get("records") or [{}])[0]
        peaks = beside("MiB", MIB, plan.get("peak"), one["peak"])
        times = beside("ms", 1e-3, plan.get("estimated_seconds"), one["seconds"])
        steps.append({"step": name.replace("/", ", "), **peaks, **times})
    for what, one in records("alone/"):
        if what in IMPLEMENTATIONS:
            times = {f"{way}, ms": 1e3 * one[f"{way}_seconds"] for way in ("forward", "backward")}
            operators.append({"operator": one["name"], "implementation": what, **times})
    for _, one in records("alone/losses"):
        kernel = "trained" if one["kernel_is_trained"] else "frozen"
        sizes = {"temporaries, GiB": one["program_temporaries"] / GIB, "ms": 1e3 * one["seconds"]}
        losses.append({"loss": one["name"], "kernel": kernel, **sizes})
    for _, one in records("alone/optimizers"):
        names = {"8-bit state": str(one["is_8bit"]), "parameters": one["master_weights"]}
        optimizers.append({**names, "ms": 1e3 * one["seconds"]})
    every = checks, steps, operators, losses, optimizers
    return "\n".join(markdown(rows) for rows in every if rows)


def main(output: Path, device: str = "h200", smoke: bool = False) -> int:
    """Checks and measures what needs a GPU, and writes one file of results.

    Args:
      output: the folder of the results.
      device: this GPU's name in `lowmembp devices`.
      smoke: run tiny sizes on a CPU.
    """
    lm.memory.get_device(device)  # a wrong name is an error now, and not in each job
    models, methods = (SMOKE, METHODS[:2]) if smoke else (STEPS, METHODS)
    each = [(model, method) for method in methods for model in models]
    jobs = {f"measure/{'/'.join(one)}": partial(measure, *one, device, smoke) for one in each}
    for name in ("pallas_interpret",) if smoke else IMPLEMENTATIONS:
        jobs[f"kernels/{name}"] = partial(kernels, name, smoke)
    for name in (*(("xla",) if smoke else IMPLEMENTATIONS), "losses", "optimizers"):
        jobs[f"alone/{name}"] = partial(alone, name, smoke)
    for model, method in each:
        if ", " not in method:  # Triton needs a GPU
            jobs[f"plan/{model}/{method}"] = partial(plan, model, method, device)
    path = output / "on_gpu.json"
    results = json.loads(path.read_text()) if path.exists() else {"jobs": {}}
    results |= {"versions": versions(), "device": device}
    results["command"] = " ".join(["python", *sys.argv])
    done = results["jobs"]
    for name, job in jobs.items():
        if done.get(name, {}).get("status") == "done":
            continue
        began = time.monotonic()
        done[name] = start(job, smoke or name.startswith("plan/"))
        write_json(path, results)
        print(f"{name}: {done[name]['status']}, {time.monotonic() - began:.1f} s", flush=True)
    print(tables(done))
    failed = [name for name in jobs if done[name]["status"] != "done"]
    records = [(name, record) for name in jobs for record in done[name]["records"]]
    wrong = [f"{name}: {record}" for name, record in records if not record.get("passed", True)]
    print(*wrong, *(f"failed: {name}" for name in failed), sep="\n")
    print(f"{len(jobs) - len(failed)} of {len(jobs)} done, {len(wrong)} wrong: {path}")
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
