"""Random programs under lm.compress: 50 a run, from a seed that is printed with a failure.

Each program applies some of the `LAYERS` to one array, inside a random transformation. With
`dtype=None`, `jax.checkpoint` gives the same results and gradients, except for XLA's rounding. The
error of a rounded gradient must be small beside the change that 2% noise on all inputs makes.
`PROGRAM_SEED=5 pytest -m slow tests/test_random_programs.py` runs the programs of one seed again.
"""

import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from storage_cases import layer_norm
from storage_cases import rms_norm as rms

import lowmembp_jax as lm

SEED = int(os.environ.get("PROGRAM_SEED", secrets.randbelow(10**6)))
ROWS, WIDTH = 24, 32
POLICIES = (
    lm.products_saveable,
    lm.everything_saveable,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("kept"),
)


def attention(w, x):
    q, k, v = x @ w, rms(x), x
    return jax.nn.softmax(q @ k.T / WIDTH**0.5, axis=-1) @ v


def recurrence(w, x):
    def step(h, row):
        h = jnp.tanh(row + rms(h @ w) / 2)
        return h, h @ w

    return lax.scan(step, jnp.zeros(WIDTH, x.dtype), x)[1]


def gated_recurrence(w, x):
    gate, value = jax.nn.sigmoid(x @ w), x * 0.5

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(join, (gate, value))[1]


def unit_vectors(w, x):
    y = (x @ w).reshape(ROWS, WIDTH // 4, 4)
    return (y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 0.1)).reshape(x.shape)


def experts(w, x):
    chosen = jnp.argsort(x @ w, axis=-1)[:, :8]
    return x + jnp.pad(jnp.take_along_axis(x @ w, chosen, axis=-1), ((0, 0), (0, WIDTH - 8)))


def own_derivative(w, x):
    @jax.custom_vjp
    def act(a):
        return jnp.sin(a)

    act.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (g * jnp.cos(a),))
    return act(x @ w)


def with_callback(w, x):
    y = x @ w
    jax.debug.callback(lambda value: None, y.sum())
    jax.debug.callback(lambda value: None, y)
    return jnp.sin(y)


def branches(w, x):
    return lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ w), lambda x: rms(x) @ w, x)


def solved(w, x):
    matrix = x.T @ x / ROWS + 2 * jnp.eye(WIDTH, dtype=x.dtype)
    return jnp.linalg.solve(matrix.astype(jnp.float32), x.T.astype(jnp.float32)).T.astype(x.dtype)


#: Functions of a square kernel and the rows.
LAYERS = {
    "dense": lambda w, x: x @ w,
    "mlp": lambda w, x: jax.nn.gelu(x @ w) @ w,
    "silu": lambda w, x: jax.nn.silu(x @ w) * (x @ w[::-1]),
    "relu": lambda w, x: jax.nn.relu(x @ w) + x,
    "rms": lambda w, x: rms(x @ w),
    "layer_norm": lambda w, x: layer_norm(x @ w + x),
    "norm_first": lambda w, x: x + rms(x) @ w,
    "library_norm": lambda w, x: lm.ms_rms_norm(x @ w),
    "attention": attention,
    "recurrence": recurrence,
    "gated_recurrence": gated_recurrence,
    "map": lambda w, x: lax.map(lambda row: row @ w, x),
    "nested_map": lambda w, x: lax.map(
        lambda part: lax.map(lambda row: jnp.sin(row @ w), part), x.reshape(4, -1, WIDTH)
    ).reshape(x.shape),
    "loop": lambda w, x: lax.fori_loop(0, 2, lambda _, h: rms(h @ w + x), x),
    "hypot": lambda w, x: jnp.hypot(x @ w, x),
    "quotient": lambda w, x: (x @ w) / (1 + jnp.square(x @ w) + jnp.abs(x)),
    "unit_vectors": unit_vectors,
    "logsumexp": lambda w, x: x - jax.nn.logsumexp(x @ w, axis=-1, keepdims=True),
    "softplus": lambda w, x: jnp.log1p(jnp.exp(-jnp.abs(x @ w))) + jnp.maximum(x, 0),
    "sinc": lambda w, x: jnp.sinc(x @ w),
    "power": lambda w, x: jnp.sqrt(jnp.square(x @ w) + 0.1) + x**3 / 10,
    "cumsum": lambda w, x: jnp.cumsum(jnp.tanh(x @ w), axis=0) / ROWS,
    "sort": lambda w, x: jnp.sort(x @ w, axis=-1),
    "experts": experts,
    "dropout": lambda w, x: jnp.where(
        jax.random.bernoulli(jax.random.key(5), 0.8, x.shape), x @ w, 0
    ).astype(x.dtype),
    "rotation": lambda w, x: jnp.concatenate(jnp.split(jnp.sin(x @ w), 2, axis=-1)[::-1], axis=-1),
    "spectrum": lambda w, x: (
        jnp.fft.rfft(x.astype(jnp.float32), axis=-1).real.astype(x.dtype).sum(-1, keepdims=True)
        / WIDTH
        + x @ w
    ),
    "convolution": lambda w, x: (
        x + jnp.stack([jnp.convolve(x[:, 0], w[0, :3], mode="same")] * WIDTH, axis=-1)
    ),
    "solved": solved,
    "named": lambda w, x: jnp.tanh(checkpoint_name(x @ w, "kept")) * x,
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)) @ w)(x),
    "jit": lambda w, x: jax.jit(lambda x: rms(jnp.sin(x @ w)))(x),
    "own_derivative": own_derivative,
    "callback": with_callback,
    "branches": branches,
    "barrier": lambda w, x: lax.optimization_barrier(jnp.cos(x @ w)) * x,
    "stop": lambda w, x: x * lax.stop_gradient(jax.nn.sigmoid(x @ w)),
}

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


def program(rng):
    """Draws a program: its description, the function of kernels and rows, and how it is called."""
    names = [str(rng.choice(list(LAYERS))) for _ in range(rng.integers(2, 6))]
    residual = [bool(rng.integers(2)) for _ in names]

    def function(ws, x):
        for w, name, is_added in zip(ws, names, residual, strict=True):
            y = LAYERS[name](w, x)
            x = x + y if is_added else y
        return x

    call = str(rng.choice(list(CALLS)))
    return [*zip(names, residual, strict=True)], function, call


def assert_same(got, want, told):
    """Compares two compiled programs, in which XLA may fuse products and sums differently."""
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    atol = 16 * float(jnp.finfo(jnp.float32).eps) * np.max(np.abs(want))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=told)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_a_random_program(number, jax_defaults):
    rng = np.random.default_rng([SEED, number])
    layers, function, call = program(rng)
    policy = POLICIES[rng.integers(len(POLICIES))]
    dtype = [jnp.float32, jnp.float32, jnp.bfloat16][rng.integers(3)]
    is_param = bool(rng.integers(2))
    told = f"PROGRAM_SEED={SEED}, number {number}: {layers}, {call}, {policy}, {dtype}, {is_param}"
    print(told)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    ws, x = normal(len(layers), WIDTH, WIDTH) / WIDTH**0.5, normal(ROWS, WIDTH)
    weights = jnp.asarray(rng.normal(size=(2, ROWS, WIDTH)), jnp.float32)

    def run(transformed, *given):
        def loss(ws, x):
            y = CALLS[call](transformed, ws, x)
            return jnp.sum(y.astype(jnp.float32) * (weights if y.ndim == 3 else weights[0])), y

        step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        options = {"xla_allow_excess_precision": False}
        (_, y), gradients = jax.jit(step, compiler_options=options)(*given)
        return y, gradients

    y, want = run(jax.checkpoint(function, policy=policy), ws, x)
    if not all(jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((y, want))):
        pytest.skip("the program leaves the range of its dtype")
    params = {"params_argnums": 0 if is_param else ()}
    same, exact = run(lm.compress(function, policy=policy, dtype=None, **params), ws, x)
    assert_same(same, y, told)
    assert error(exact, want) < (1e-4 if dtype == jnp.float32 else 0.03), told
    noisy = []
    for _ in range(3):
        near = [a * (1 + 0.02 * normal(*a.shape)) for a in (ws, x)]
        noisy.append(error(run(function, *near)[1], want))
    for storage in ("float8", "int8"):
        same, rounded = run(lm.compress(function, policy=policy, dtype=storage, **params), ws, x)
        assert_same(same, y, told)
        assert error(rounded, want) < 0.05 + 3 * max(noisy), (told, storage, noisy)
