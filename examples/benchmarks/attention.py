"""Checks and times the models' attention: each implementation against float32.

cuDNN's attention runs only on a GPU, so only this stage of `on_gpu.py` checks it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.stages import Cases, Machine, reason
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, time_calls
from lowmembp_examples.models.attention import attention
from lowmembp_examples.models.common import Attention

#: Largest norm(result - reference) / norm(reference): probabilities are rounded to the dtype.
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3}


class Case(NamedTuple):
    """Sizes of one model's attention, and whether it has a `bias` and `lengths`."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool = False
    bias: bool = False
    lengths: bool = False


CASES = {
    "ViT-B, odd": Case(64, 197, 12, 12, 64),
    "BERT-base, padded": Case(64, 128, 12, 12, 64, lengths=True),
    "Swin-T, windows": Case(4096, 49, 3, 3, 32, bias=True),
    "LLaMA-7B": Case(4, 2048, 32, 32, 128, causal=True),
    "LLaMA, grouped, odd": Case(4, 1023, 32, 8, 128, causal=True),
}


def draw(case: Case, dtype: Any, seed: int) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Draws differentiated arrays by name, with the cotangent "g"; and keyword arguments."""
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
    """Returns the output, and the gradients by name."""
    inputs = {name: array for name, array in arrays.items() if name != "g"}

    def forward(inputs):
        q, k, v = (inputs[name] for name in "qkv")
        return attention(q, k, v, implementation, bias=inputs.get("bias"), **more)

    out, vjp = jax.vjp(forward, inputs)
    return {"out": out} | {f"d{name}": grad for name, grad in vjp(arrays["g"])[0].items()}


def error(got: jax.Array, want: np.ndarray) -> float:
    difference = np.asarray(got.astype(jnp.float32)).astype(np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


def compare(case: Case, effort: Effort) -> Iterator[dict[str, Any]]:
    """Yields a record for each dtype and implementation, with the reason if it does not run."""
    seed = np.random.SeedSequence().entropy % 2**31
    for dtype, tolerance in TOLERANCES.items():
        arrays, more = draw(case, jnp.dtype(dtype), seed)
        exact = {name: array.astype(jnp.float32) for name, array in arrays.items()}
        with jax.default_matmul_precision("highest"):
            want = jax.device_get(jax.jit(partial(step, "xla", more))(exact))
        for implementation in get_args(Attention):
            record = {"implementation": implementation, "dtype": dtype, "seed": seed}
            record |= {"sizes": case._asdict(), "tolerance": tolerance}
            try:
                program = jax.jit(partial(step, implementation, more)).lower(arrays).compile()
                errors = {name: error(a, want[name]) for name, a in program(arrays).items()}
            except Exception as why:  # The error is a result; the other implementations still run.
                yield record | {"status": f"failed: {reason(why)}", "passed": False}
                continue
            time = time_calls(lambda _, run=program, on=arrays: run(on), effort)
            yield record | {
                "status": "checked",
                # A NaN exceeds every limit.
                "passed": all(e <= tolerance for e in errors.values()),
                "errors": errors,
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
                "milliseconds": time["seconds"] * 1e3,
                "quartiles": [each * 1e3 for each in time["quartiles"]],
            }


def cases(machine: Machine) -> Cases:
    if machine.smoke:
        small = CASES["LLaMA, grouped, odd"]._replace(batch=2, tokens=19, bias=True, lengths=True)
        return {"LLaMA, grouped, odd": partial(compare, small, SMOKE)}
    return {name: partial(compare, case, Effort()) for name, case in CASES.items()}
