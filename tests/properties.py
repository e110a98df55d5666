"""What the property tests draw: arrays with hard values, and ways to call an operator.

They run with a few examples, always the same. Other ones each time, and for half an hour:

    HYPOTHESIS_PROFILE=thorough pytest tests/test_properties.py
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from jax import lax

_all = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("quick", max_examples=4, derandomize=True, **_all)
settings.register_profile("thorough", max_examples=150, print_blob=True, **_all)
# To see failures soon: each step of shrinking compiles.
_first = dict(phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
settings.register_profile("unshrunk", max_examples=150, **_first, **_all)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

DTYPES = ("float16", "bfloat16", "float32")
dtypes = st.sampled_from(DTYPES)
implementations = st.sampled_from(["xla", "pallas_interpret"])
_SIZES = (0, 1, 2, 3, 5, 8, 31, 33, 127, 129, 300, 1025)
#: The smallest normal number of float32: XLA's CPU programs take for 0 what is below it.
TINY = float(np.finfo(np.float32).tiny)


@st.composite
def shapes(draw, least=0, most=2500) -> tuple[int, ...]:
    """Draws shapes of rank 1 to 4: empty axes, axes of 1, odd sizes, none a multiple of 128."""
    shape = [draw(st.sampled_from([size for size in _SIZES if size >= least]))]
    for _ in range(draw(st.integers(0, 3))):
        room = most // max(int(np.prod(shape)), 1)
        shape.insert(0, draw(st.sampled_from([n for n in _SIZES if least <= n <= max(room, 1)])))
    return tuple(shape)


def numbers(dtype, *near: float, finite=False) -> st.SearchStrategy[float]:
    """0, -0, subnormals, the largest ones, inf, NaN, `near` and its neighbours, and common ones."""
    info = jnp.finfo(dtype)
    hard = [float(getattr(info, name)) for name in ("tiny", "smallest_subnormal", "max")]
    hard += [at * (1 + step * float(info.eps)) for at in near for step in (-1, 0, 1)]
    hard = [0.0, 1.0, *hard, *([] if finite else [np.inf])]
    every = [sign * value for value in hard for sign in (1.0, -1.0)] + [np.nan] * (not finite)
    return st.one_of(st.sampled_from(every), st.floats(-12, 12, width=16))


@st.composite
def arrays(draw, shape, dtype, some):
    """Some numbers over and over: a failing example has few of them."""
    values = draw(st.lists(some, min_size=1, max_size=9))
    return jnp.asarray(np.resize(np.array(values), shape).astype(jnp.dtype(dtype)))


def results(op: Callable, args, g):
    """The value, and the gradients of the arguments for a cotangent."""
    y, vjp = jax.vjp(op, *args)
    return y, *vjp(g)


def call(way: str, op: Callable, args, g, mapped: int):
    """`results` by a transformation; the first `mapped` arguments have the leading axis."""
    if way == "plain":
        return results(op, args, g)
    if way == "jit":
        return jax.jit(lambda args, g: results(op, args, g))(args, g)
    if way == "gradient of jit":
        return results(jax.jit(op), args, g)
    if way == "remat":
        return results(jax.checkpoint(op), args, g)
    if way == "vmap":
        return results(jax.vmap(op, (0,) * mapped + (None,) * (len(args) - mapped)), args, g)
    assert way == "scan"

    def scanned(*args):
        return lax.scan(lambda _, xs: (0, op(*xs, *args[mapped:])), 0, args[:mapped])[1]

    return results(scanned, args, g)


WAYS = ("plain", "jit", "gradient of jit", "remat", "vmap", "scan")


def ways(shape) -> st.SearchStrategy[str]:
    return st.sampled_from(WAYS if len(shape) > 1 else WAYS[:4])


def wide(x) -> np.ndarray:
    """In float64, with what float32 would take for 0 as 0."""
    x = np.asarray(x).astype(np.float64)
    return np.where(np.abs(x) < TINY, np.copysign(0, x), x)


def assert_near(got, want, bound, dtype):
    """`bound` is of the error; a result is finite where `want` is in `dtype`, and nowhere else."""
    want, bound = np.broadcast_arrays(np.asarray(want, np.float64), bound)
    assert got.shape == want.shape and got.dtype == jnp.dtype(dtype)
    got = np.asarray(got).astype(np.float64)
    largest = float(jnp.finfo(dtype).max)
    fits = np.abs(want) + bound <= largest
    beyond = ~(np.abs(want) - bound <= largest)
    assert np.isfinite(got[fits]).all() and not np.isfinite(got[beyond & ~np.isnan(bound)]).any()
    np.testing.assert_array_less(np.abs(got - want)[fits], bound[fits] + TINY)
