"""Random programs under lm.compress: 50 a run, from a seed that is printed with a failure.

Each program applies some functions of test_primitives.py to one array, inside a random
transformation. With `dtype=None`, `jax.checkpoint` gives the same results and gradients, except for
XLA's rounding. The error of a rounded gradient must be small beside the change that 2% noise on all
inputs makes. `PROGRAM_SEED=5 pytest -m slow tests/test_random_programs.py` runs the programs of one
seed again.
"""

import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from jax import lax
from test_primitives import FUNCTIONS, ROWS, WIDTH

import lowmembp_jax as lm

SEED = int(os.environ.get("PROGRAM_SEED", secrets.randbelow(10**6)))
POLICIES = (
    lm.products_saveable,
    lm.everything_saveable,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("tanh"),
)
#: One after the other, these make XLA's rounding large; JAX cannot map the last one.
LEFT_OUT = ("cancel", "div", "integer_pow", "large_logits", "maximum", "pow_of_both", "rem", "tan")
LEFT_OUT += ("ragged_dot",)
#: Functions of a compressed function, kernels and rows: how a model calls the function.
CALLS = {
    "plain": lambda f, ws, x: f(ws, x),
    "jit": lambda f, ws, x: jax.jit(f)(ws, x),
    "twice": lambda f, ws, x: f(ws, f(ws, x)),
    "scan": lambda f, ws, x: lax.scan(lambda h, _: (f(ws, h), None), x, None, length=2)[0],
    "vmap": lambda f, ws, x: jax.vmap(f, (None, 0))(ws, jnp.stack([x, x[::-1]])),
    "vmap_params": lambda f, ws, x: jax.vmap(f, (0, None))(jnp.stack([ws, ws[::-1]]), x),
    "checkpoint": lambda f, ws, x: jax.checkpoint(f)(ws, x),
}


def layers():
    """Names of functions whose result has the shape and dtype of the rows."""
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names = [name for name in FUNCTIONS if not name.startswith(LEFT_OUT)]
        return [name for name in names if jax.eval_shape(FUNCTIONS[name], rows) == rows]


def assert_same(got, want, told):
    """Compares two compiled programs, in which XLA may fuse products and sums differently."""
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    atol = 16 * float(jnp.finfo(jnp.float32).eps) * np.max(np.abs(want))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=told)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* runs jax.checkpoint with its policy")
@pytest.mark.parametrize("number", range(50))
def test_a_random_program(number, jax_defaults):
    rng = np.random.default_rng([SEED, number])
    names = [str(rng.choice(layers())) for _ in range(rng.integers(2, 6))]
    residual = [bool(rng.integers(2)) for _ in names]

    def function(ws, x):
        for w, name, is_added in zip(ws, names, residual, strict=True):
            y = FUNCTIONS[name](lm.ms_rms_norm(x @ w))
            x = x + y if is_added else y
        return x

    call = str(rng.choice(list(CALLS)))
    policy = POLICIES[rng.integers(len(POLICIES))]
    params = {"params_argnums": 0 if rng.integers(2) else ()}
    told = f"PROGRAM_SEED={SEED}, number {number}: {names}, {residual}, {call}, {policy}, {params}"

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ws, x = normal(len(names), WIDTH, WIDTH) / WIDTH**0.5, normal(ROWS, WIDTH)
    weights = normal(2, ROWS, WIDTH)

    def run(transformed, *given):
        def loss(ws, x):
            y = CALLS[call](transformed, ws, x)
            return jnp.sum(y * (weights if y.ndim == 3 else weights[0])), y

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, y), gradients = step(*given)
        return y, gradients

    y, want = run(jax.checkpoint(function, policy=policy), ws, x)
    if not all(jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((y, want))):
        pytest.skip("the program leaves the range of its dtype")
    same, exact = run(lm.compress(function, policy=policy, dtype=None, **params), ws, x)
    assert_same(same, y, told)
    assert error(exact, want) < 1e-4, told
    noisy = []
    for _ in range(3):
        near = [a * (1 + 0.02 * normal(*a.shape)) for a in (ws, x)]
        noisy.append(error(run(function, *near)[1], want))
    for storage in ("float8", "int8"):
        same, rounded = run(lm.compress(function, policy=policy, dtype=storage, **params), ws, x)
        assert_same(same, y, told)
        assert error(rounded, want) < 0.05 + 3 * max(noisy), (told, storage, noisy)
