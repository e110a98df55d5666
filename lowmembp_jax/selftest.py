"""Checks this installation: `python -m lowmembp_jax.selftest`, under a minute on a CPU.

It compares each operator with the function that the operator replaces, and prints one line for
each check. The exit status is 1 if a check fails.
"""

import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import lowmembp_jax as lm


class _Block(linen.Module):
    """A plain Flax model, without this library."""

    @linen.compact
    def __call__(self, x):
        h = linen.gelu(linen.Dense(256)(linen.LayerNorm()(x)))
        return x + linen.Dense(64)(h)


def checks() -> dict[str, tuple[Any, Any, tuple[Any, ...], float, float | None]]:
    """The checks by name.

    Each has the operator, the function that it replaces, their arguments, the largest error of the
    gradients, and the largest ratio of saved bytes (None: unchecked).
    """
    x, up = jax.random.normal(jax.random.key(0), (2, 128, 64))
    block, rngs = _Block(), nnx.Rngs(0)
    args, plain = (block.init(jax.random.key(1), x), x), block.apply
    standardized = partial(jax.nn.standardize, epsilon=1e-6)
    kernels = partial(lm.gelu, implementation="pallas_interpret")
    norms = lm.nnx.MSLayerNorm(64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs)
    return {
        "gelu, 2 bits": (lm.gelu, jax.nn.gelu, (x,), 0.2, 0.2),
        "silu, 4 bits": (partial(lm.silu, bits=4), jax.nn.silu, (x,), 0.06, 0.2),
        "swiglu": (lm.swiglu, lambda x, up: jax.nn.silu(x) * up, (x, up), 1e-5, 1),
        "layer_norm": (lm.ms_layer_norm, standardized, (x,), 1e-5, None),
        "NNX": (*norms, (x,), 1e-5, None),
        "kernels": (kernels, lm.gelu, (x,), 1e-5, 1),
        "patch": (lm.patch(plain), plain, args, 0.2, 0.8),
        "compress": (lm.compress(plain), plain, args, 0.06, 0.3),
        "compress, int8": (lm.compress(plain, dtype="int8"), plain, args, 0.03, 0.3),
    }


def check(ours, plain, args, most: float, share: float | None) -> str:
    """Runs one check; returns the gradients' error and the saved bytes as text.

    Raises:
      AssertionError: values, gradients or saved bytes are wrong.
    """

    @partial(jax.jit, static_argnums=0)
    def run(function, *args):
        y, vjp = jax.vjp(function, *args)
        return y, vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    (y, got), (y_plain, exact) = run(ours, *args), run(plain, *args)
    errors = [lm.gradient_distance(y, y_plain).error, lm.gradient_distance(got, exact).error]
    for what, error, bound in zip(("values", "gradients"), errors, (1e-5, most), strict=True):
        if not error <= bound:  # NaN fails, too
            raise AssertionError(f"{what}: expected an error up to {bound:.2g}, got {error:.2g}")
    kept, before = (
        lm.memory.saved_bytes(lambda *args, f=f: jnp.sum(f(*args)), *args) for f in (ours, plain)
    )
    if share is not None and kept > share * before:
        raise AssertionError(
            f"residuals: expected at most {share:.0%} of {before:,} bytes, got {kept:,}"
        )
    return f"gradients {errors[1]:.2g} off, residuals {kept:,} bytes instead of {before:,}"


def check_planner() -> str:
    """Compiles a step for a GPU; returns the GPU's name as text."""
    if missing := lm.memory.missing_wheels():
        return f"not checked, without {', '.join(missing)} (the planner extra)"
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    step = jax.grad(lambda w, x: lm.gelu(x @ w).sum())
    memory = lm.memory.compile_for(step, shape, shape, device="h200").memory_analysis()
    assert memory is not None and memory.argument_size_in_bytes == 2 * 4 * 256**2, memory
    return "a step compiled for an H200"


def main() -> int:
    """Runs all checks and prints their results; returns the exit status."""
    start, failed = time.monotonic(), []
    every = {name: partial(check, *case) for name, case in checks().items()}
    for name, run in {**every, "planner": check_planner}.items():
        try:
            print(f"{name}: {run()}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    print(
        f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}, in "
        f"{time.monotonic() - start:.0f} s, JAX {jax.__version__}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
