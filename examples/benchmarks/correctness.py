"""Checks the operators' kernels against float64, and the models' attention against float32.

Two stages of `on_gpu.py`. The inputs are new random numbers each time; a record has the seed. The
reference in float64 is the operator's `jax.numpy` implementation, which the tests check on a CPU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.stages import Cases, Machine, reason

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.layers import Attention

#: Largest norm(result - reference) / norm(reference), and largest difference of one element over
#: the largest element of the reference. A bfloat16 result is rounded to 2^-9.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}
#: The same for attention, which rounds its probabilities.
ATTENTION_TOLERANCES = {"float16": (2e-3, 1e-2), "bfloat16": (1e-2, 5e-2)}
#: The kernels' rows, an odd number.
ROWS = 253


class Kernel(NamedTuple):
    """An operator; x has rows of `width`, as have `arrays - 1` arrays after it.

    `parameters` arguments of shape `[width]` follow.
    """

    op: Callable
    width: int = 3072
    arrays: int = 1
    parameters: int = 0


def _norms(name: str, op: Callable, parameters: int) -> dict[str, Kernel]:
    # By default the implementation decides what a norm with a scale saves.
    return {name: Kernel(op, 768)} | {
        f"{name}, saves its {saved}": Kernel(partial(op, residual=saved), 768, 1, parameters)
        for saved in ("normalized", "output")
    }


KERNELS = {
    "gelu_tanh": Kernel(lm.gelu),
    "gelu_tanh, 4 bits": Kernel(partial(lm.gelu, bits=4)),
    "gelu_erf": Kernel(partial(lm.gelu, approximate=False)),
    "silu": Kernel(lm.silu),
    **_norms("layer_norm", lm.ms_layer_norm, 2),
    **_norms("rms_norm", lm.ms_rms_norm, 1),
    "swiglu": Kernel(lm.swiglu, arrays=2),
    "geglu_tanh": Kernel(lm.geglu, arrays=2),
    "geglu_erf": Kernel(partial(lm.geglu, approximate=False), arrays=2),
}
_SMOKE_KERNELS = ("gelu_tanh", "layer_norm, saves its output", "swiglu")


def errors(got: Any, want: Any) -> tuple[float, float]:
    """Returns the two errors that `TOLERANCES` bounds, the largest over two lists of arrays."""
    found = []
    for ours, exact in zip(got, want, strict=True):
        exact = np.asarray(exact, np.float64)
        difference = np.asarray(ours).astype(np.float64) - exact
        found.append(
            (
                float(np.linalg.norm(difference) / np.linalg.norm(exact)),
                float(np.max(np.abs(difference)) / np.max(np.abs(exact))),
            )
        )
    return tuple(np.max(found, axis=0).tolist())  # NaN if any is NaN


def _run(op: Callable, poison: Any, cotangent: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the output and the gradients of `op`, written over the donated `poison`."""
    y, vjp = jax.vjp(op, *arrays)
    return [y, *vjp(cotangent)]


def _checked(run: Callable, want: Any, tolerance: tuple[float, float]) -> dict[str, Any]:
    """Returns a record of the errors of `run()`, or why there are none."""
    try:
        found = errors(run(), want)
    except Exception as error:  # The error is a result, and the other checks still run.
        return {"passed": False, "status": f"failed: {reason(error)}"}
    # NaN exceeds every limit.
    passed = bool(np.all(np.array(found) <= tolerance))
    return {"passed": passed, "status": "checked", "errors": found, "tolerance": tolerance}


def check(kernel: Kernel, implementation: str, dtype: str, rows: int, seed: int) -> dict[str, Any]:
    """Returns a record of one kernel's output and gradients, beside its float64 reference."""
    rng = np.random.default_rng(seed)
    shape = rows, kernel.width
    # x reaches every threshold of the step tables; scales are in 1 to 3.
    arrays = [jnp.asarray(4 * rng.normal(size=shape), dtype) for _ in range(kernel.arrays)]
    arrays += [
        jnp.asarray(2 + np.tanh(rng.normal(size=kernel.width)), jnp.float32)
        for _ in range(kernel.parameters)
    ]
    cotangent = jnp.asarray(rng.normal(size=shape), dtype)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(a).astype(np.float64)) for a in (cotangent, *arrays)]
        want = jax.jit(partial(_run, partial(kernel.op, implementation="xla"), ()))(*exact)

    def run() -> list[jax.Array]:
        # An element that a kernel does not write stays NaN.
        poison = [jnp.full(a.shape, jnp.nan, a.dtype) for a in (cotangent, *arrays)]
        ours = partial(_run, partial(kernel.op, implementation=implementation))
        return jax.jit(ours, donate_argnums=0, keep_unused=True)(poison, cotangent, *arrays)

    return _checked(run, want, TOLERANCES[dtype])


def _new_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def check_kernels(implementation: str, names: tuple[str, ...], rows: int) -> Iterator[dict]:
    seed = _new_seed()
    for name in names:
        for dtype in TOLERANCES:
            record = {"kernel": name, "implementation": implementation, "dtype": dtype}
            found = check(KERNELS[name], implementation, dtype, rows, seed)
            yield record | {"rows": rows, "seed": seed} | found


class Heads(NamedTuple):
    """The sizes of one model's attention, and whether it has a `bias` and `lengths`."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool = False
    bias: bool = False
    lengths: bool = False


ATTENTIONS = {
    "ViT-B, odd": Heads(64, 197, 12, 12, 64),
    "BERT-base, padded": Heads(64, 128, 12, 12, 64, lengths=True),
    "Swin-T, windows": Heads(4096, 49, 3, 3, 32, bias=True),
    "LLaMA-7B": Heads(4, 2048, 32, 32, 128, causal=True),
    "LLaMA, grouped, odd": Heads(4, 1023, 32, 8, 128, causal=True),
}


def check_attention(heads: Heads) -> Iterator[dict[str, Any]]:
    """Yields a record for each dtype and implementation, with the reason if it does not run."""
    rng = np.random.default_rng(seed := _new_seed())
    queries = (heads.batch, heads.tokens, heads.heads, heads.head_size)
    keys = (heads.batch, heads.tokens, heads.kv_heads, heads.head_size)
    drawn = [rng.normal(size=shape) for shape in (queries, queries, keys, keys)]
    if heads.bias:
        drawn.append(rng.normal(size=(1, heads.heads, heads.tokens, heads.tokens)))
    more: dict[str, Any] = {"causal": heads.causal}
    if heads.lengths:
        lengths = rng.integers(1, heads.tokens + 1, heads.batch)
        more["lengths"] = jnp.asarray(lengths, jnp.int32)

    def step(implementation, cotangent, *arrays):
        def forward(q, k, v, bias=None):
            return attention(q, k, v, implementation, bias=bias, **more)

        return _run(forward, (), cotangent, *arrays)

    for dtype, tolerance in ATTENTION_TOLERANCES.items():
        arrays = [jnp.asarray(array, dtype) for array in drawn]
        with jax.default_matmul_precision("highest"):
            exact = [array.astype(jnp.float32) for array in arrays]
            want = jax.device_get(jax.jit(partial(step, "xla"))(*exact))
        for implementation in get_args(Attention):
            record = {"implementation": implementation, "dtype": dtype, "seed": seed}
            record |= {"sizes": heads._asdict()}
            run = partial(jax.jit(partial(step, implementation)), *arrays)
            yield record | _checked(run, want, tolerance)


def kernels(machine: Machine) -> Cases:
    names, rows = (_SMOKE_KERNELS, 16) if machine.smoke else (tuple(KERNELS), ROWS)
    return {who: partial(check_kernels, who, names, rows) for who in machine.implementations}


def attentions(machine: Machine) -> Cases:
    if machine.smoke:
        small = Heads(2, 19, 32, 8, 128, causal=True, bias=True, lengths=True)
        return {"small": partial(check_attention, small)}
    return {name: partial(check_attention, heads) for name, heads in ATTENTIONS.items()}
