"""What tests of several operators use."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm
from lowmembp_jax.memory.calibration import Calibration
from lowmembp_jax.memory.result import PARTS

_OPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):
    _OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
#: `jax.jit` with users' options, see conftest.py, for results that agree to the last place.
optimized_jit = functools.partial(jax.jit, compiler_options=_OPTIMIZED)

GELU_ERF = functools.partial(jax.nn.gelu, approximate=False)
#: Our activations, the functions of `jax.nn` that they are exactly, and the tables of their slopes.
ACTIVATIONS = {
    "regelu2_tanh": (lm.regelu2, jax.nn.gelu, lm.REGELU2_TABLE),
    "regelu2_erf": (
        functools.partial(lm.regelu2, approximate=False), GELU_ERF, lm.REGELU2_TABLE,
    ),
    "resilu2": (lm.resilu2, jax.nn.silu, lm.RESILU2_TABLE),
}  # fmt: skip
for _name, _op, _exact in (
    ("gelu_tanh", lm.gelu, jax.nn.gelu),
    ("gelu_erf", functools.partial(lm.gelu, approximate=False), GELU_ERF),
    ("silu", lm.silu, jax.nn.silu),
):
    for _bits in (2, 4):
        _table = lm.STEP_TABLES[_name, _bits]
        ACTIVATIONS[f"{_name}_{_bits}"] = functools.partial(_op, bits=_bits), _exact, _table

#: Devices that reach their published rates: times are then easily computed by hand.
AS_PUBLISHED = Calibration({"bf16": 1.0}, bandwidth=1.0)


def python(*arguments, **environment) -> subprocess.CompletedProcess:
    """Runs Python in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def normal(*shape: int, key: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers from NumPy: `jax.random` compiles a program for each shape."""
    drawn = np.random.default_rng((key, *shape)).standard_normal(shape)
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def integers(*shape: int, low: int, high: int, key: int = 0) -> jax.Array:
    """Numbers from `low` up to but not including `high`."""
    drawn = np.random.default_rng((key, *shape)).integers(low, high, shape, np.int32)
    return jnp.asarray(drawn)


def initial(module: Any, *inputs: Any) -> Any:
    """Random variables of a Flax module, whose own `init` would compile its whole forward."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(module.init, jax.random.key(0), *inputs))
    drawn = (np.asarray(normal(*x.shape, key=i, dtype=x.dtype)) for i, x in enumerate(leaves))
    # Scales and biases are near 1, and products as large as their inputs.
    near = [1 + 0.1 * x if x.ndim < 2 else x / x.shape[-2] ** 0.5 for x in drawn]
    return jax.tree.unflatten(structure, map(jnp.asarray, near))


def in_float64(function, *args):
    """NumPy arrays of what `function` returns for the arguments in float64."""
    # NumPy keeps subnormal numbers, and XLA does not.
    wide = lambda x: np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.tree.map(wide, args)))


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array, for a program that is compiled and not run."""
    return jax.ShapeDtypeStruct(shape, dtype)


def parts(plan: lm.memory.Plan) -> dict[str, int]:
    """Bytes of each part of the memory at the peak."""
    return {part: getattr(plan, part) for part in PARTS}


def offload(*names: str, to: str = "pinned_host"):
    """A policy that moves the arrays of these names to another memory."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names,
        offload_src="device", offload_dst=to,
    )  # fmt: skip


def temporaries(function, *args, **options) -> int:
    """Bytes of the temporaries of a compiled program at its peak."""
    return lm.memory.compile_for(function, *args, **options).memory_analysis().temp_size_in_bytes


def update_step(optimizer):
    """A step of an optimizer, of parameters, state and gradients."""

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def whole_cross_entropy(hidden, kernel, labels):
    """The mean loss of whole logits, as users compute it."""
    logits = (hidden @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="run by test_kernels.py, with TRITON_INTERPRET=1"
)
each_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", "pallas_interpret", pytest.param("triton", marks=only_interpreted)],
    ids=["XLA", "Pallas", "Triton"],
)


def assert_close(got, want, rtol=1e-5, atol=1e-5):
    """Compares trees of arrays."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, want)


def assert_equal(got, want):
    """Compares trees of arrays bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def residuals(function, *args) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and shape of each array that the backward of the function needs."""
    return [(str(aval.dtype), aval.shape) for aval, _ in saved_residuals(function, *args)]


def ulps(a, b, dtype):
    """Largest distance in units in the last place of `dtype`."""
    info = jnp.finfo(dtype)
    a, b = (np.asarray(t, np.float64) for t in (a, b))
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.abs(b), float(info.tiny)))) * float(info.eps)
    return np.max(np.abs(a - b) / spacing)
