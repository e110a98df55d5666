"""The models' attention, each implementation: values and gradients against float32, time, memory.

    python examples/benchmarks/attention.py

on a machine with a GPU. cuDNN's attention runs nowhere else, so that only there it is checked
against the others. Written after every case to `results/attention-<device>.json`; exit status 1
says that one was wrong or did not run. `--smoke` runs tiny sizes on the CPU, without cuDNN.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.compiling import reason
from lowmembp_examples.benchmarks.results_file import nvidia_smi, versions, write_json
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, time_calls
from lowmembp_examples.models.attention import attention
from lowmembp_examples.models.common import Attention

HERE = Path(__file__).resolve().parent
#: Largest norm(result - reference) / norm(reference): probabilities are rounded to the dtype.
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3}


class Case(NamedTuple):
    """Sizes of one model's attention; `bias` and `lengths` say whether it has them."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool = False
    bias: bool = False
    lengths: bool = False


CASES = {
    "ViT-B/16, odd": Case(64, 197, 12, 12, 64),
    "BERT-base, padded": Case(64, 128, 12, 12, 64, lengths=True),
    "Swin-T, windows": Case(4096, 49, 3, 3, 32, bias=True),
    "LLaMA-7B": Case(4, 2048, 32, 32, 128, causal=True),
    "LLaMA, grouped, odd": Case(4, 1023, 32, 8, 128, causal=True),
}
SMOKE_CASES = {
    name: case._replace(batch=2, tokens=min(case.tokens, 19)) for name, case in CASES.items()
}


def draw(case: Case, dtype: Any, seed: int) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arrays that are differentiated, by name, with the cotangent "g"; and keyword arguments."""
    queries = (case.batch, case.tokens, case.heads, case.head_size)
    keys = (case.batch, case.tokens, case.kv_heads, case.head_size)
    shapes = {"q": queries, "k": keys, "v": keys, "g": queries}
    if case.bias:
        shapes["bias"] = (1, case.heads, case.tokens, case.tokens)
    arrays = {
        name: jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), shape, dtype)
        for index, (name, shape) in enumerate(shapes.items())
    }
    more: dict[str, Any] = {"causal": case.causal}
    if case.lengths:
        lengths = np.random.default_rng(seed).integers(1, case.tokens + 1, case.batch)
        more["lengths"] = jnp.asarray(lengths, jnp.int32)
    return arrays, more


def step(implementation: Attention, more: dict[str, Any], arrays: dict[str, jax.Array]) -> Any:
    """The output, and the gradients by name."""
    g = arrays["g"]
    inputs = {name: array for name, array in arrays.items() if name != "g"}

    def forward(inputs):
        q, k, v = (inputs[name] for name in "qkv")
        return attention(q, k, v, implementation, bias=inputs.get("bias"), **more)

    out, vjp = jax.vjp(forward, inputs)
    return {"out": out} | {f"d{name}": grad for name, grad in vjp(g)[0].items()}


def error(got: jax.Array, want: np.ndarray) -> float:
    difference = np.asarray(got.astype(jnp.float32)).astype(np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


def measure(
    case: Case, dtype: str, implementation: Attention, want: Any, seed: int, effort: Effort
) -> dict[str, Any]:
    """A record of one implementation, with the reason where it does not run."""
    arrays, more = draw(case, jnp.dtype(dtype), seed)
    try:
        program = jax.jit(partial(step, implementation, more)).lower(arrays).compile()
        errors = {name: error(array, want[name]) for name, array in program(arrays).items()}
    except Exception as why:  # one implementation's error is a result, the others go on
        return {"status": f"failed: {reason(why)}", "passed": False}
    time = time_calls(lambda _: program(arrays), effort)
    return {
        "status": "checked",
        # Written so that a NaN is beyond every limit.
        "passed": all(e <= TOLERANCES[dtype] for e in errors.values()),
        "errors": errors,
        "tolerance": TOLERANCES[dtype],
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "milliseconds_forward_and_backward": time["seconds"] * 1e3,
        "quartiles_milliseconds": [each * 1e3 for each in time["quartiles"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON; default results/attention-<device>.json")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no GPU needed")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.smoke:
        print(f"attention.py needs a GPU, and JAX has {jax.devices()}: --smoke", file=sys.stderr)
        return 2
    slug = device.device_kind.lower().replace(" ", "-")
    path = options.output or HERE / "results" / f"attention-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": device.device_kind,
        "driver": nvidia_smi("driver_version"),
        "versions": versions(),
        "numbers": "of a smoke run: they mean nothing" if options.smoke else "measured",
        "complete": False,
        "cases": [],
    }
    effort = SMOKE if options.smoke else Effort()
    for seed, (name, case) in enumerate((SMOKE_CASES if options.smoke else CASES).items()):
        for dtype in TOLERANCES:
            rounded, more = draw(case, jnp.dtype(dtype), seed)
            exact = {key: array.astype(jnp.float32) for key, array in rounded.items()}
            with jax.default_matmul_precision("highest"):
                want = jax.device_get(jax.jit(partial(step, "xla", more))(exact))
            for implementation in get_args(Attention):
                record = {"case": name, **case._asdict(), "dtype": dtype}
                record |= {"implementation": implementation}
                record |= measure(case, dtype, implementation, want, seed, effort)
                results["cases"].append(record)
                write_json(path, results)
                time = record.get("milliseconds_forward_and_backward")
                told = record["status"] if time is None else f"{time:.3f} ms"
                print(f"{name}, {dtype}, {implementation}: {told}", flush=True)
    results["complete"] = True
    write_json(path, results)
    wrong = sum(r["status"] == "checked" and not r["passed"] for r in results["cases"])
    failed = sum(r["status"] != "checked" for r in results["cases"])
    print(f"{wrong} wrong and {failed} failed of {len(results['cases'])}; written: {path}")
    return 1 if wrong or (failed and not options.smoke) else 0


if __name__ == "__main__":
    sys.exit(main())
