"""Recognizes LayerNorms and RMSNorms under other names by what they compute.

A linen module is a candidate if its parameters are one or two vectors and it holds no other module.
It is called on large and small random numbers, and is a norm if its results agree with a norm over
the last axis.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class RecognizedNorm(NamedTuple):
    """(x - mean) / sqrt(variance + epsilon) (scale + offset) + bias; no mean unless `center`."""

    center: bool
    epsilon: float
    scale: str
    offset: int
    bias: str | None
    dtype: jnp.dtype


_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-7, 1e-3, 0.0)
#: Root mean squares of the inputs that are tried. Small inputs show the epsilon.
_SIZES = (1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e-6)


def recognize(module: nn.Module, x: Any) -> RecognizedNorm | None:
    """The norm over the last axis that a module computes for inputs like x, or None."""
    if not isinstance(x, jax.Array | np.ndarray):
        return None
    params = module.variables.get("params", {})
    shapes = [getattr(p, "shape", None) for p in params.values()]
    width = x.shape[-1:]
    if set(module.variables) != {"params"} or not 1 <= len(shapes) <= 2 or {*shapes} != {width}:
        return None
    if type(module).__module__.startswith(("flax.", "lowmembp_jax.")) or width[0] < 2:
        return None
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    given = tuple((name, p.dtype) for name, p in params.items())
    alone = module.clone(parent=None, name=None)
    try:
        return _cached(alone, given, x.shape, x.dtype)
    except TypeError:  # a field of the module cannot be hashed
        return _recognize(alone, given, x.shape, x.dtype)


def _recognize(
    module: nn.Module, params: tuple[tuple[str, Any], ...], shape: tuple[int, ...], dtype: Any
) -> RecognizedNorm | None:
    try:
        with (
            jax.ensure_compile_time_eval(),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            return _tried(module, dict(params), shape, dtype)
    except Exception:  # an unknown module may raise anything for other inputs: it is no norm
        return None


_cached = functools.lru_cache(_recognize)


def _tried(
    module: nn.Module, dtypes: Mapping[str, Any], shape: tuple[int, ...], dtype: Any
) -> RecognizedNorm | None:
    random = np.random.default_rng(0)
    values = {name: random.normal(size=shape[-1]) for name in dtypes}

    def call(x, dtype) -> Any:
        cast = {name: jnp.asarray(v, dtypes[name]) for name, v in values.items()}
        return module.apply({"params": cast}, jnp.asarray(x, dtype))

    rows = random.normal(size=(3, shape[-1])) + 0.5
    rows /= np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
    outputs = {size: np.asarray(call(size * rows, jnp.float32), np.float64) for size in _SIZES}
    at_zero = np.asarray(call(0 * rows, jnp.float32), np.float64)[0]
    values = {
        name: np.asarray(jnp.asarray(v, dtypes[name]), np.float64) for name, v in values.items()
    }
    biases = [name for name in dtypes if np.allclose(at_zero, values[name], rtol=1e-2, atol=1e-6)]
    names = [name for name in dtypes if name not in biases]
    if len(names) != 1 or (not biases and np.any(at_zero)):
        return None
    small = np.ones((*(2 for _ in shape[:-1]), shape[-1]))
    out_dtype = jnp.dtype(jax.eval_shape(lambda: call(small, dtype)).dtype)
    bias = biases[0] if biases else None
    rough = max(float(jnp.finfo(each).eps) for each in (*dtypes.values(), *_dtypes(module)))
    for center in (False, True):
        for offset in (0, 1):
            for epsilon in (*_floats(module), *_EPSILONS):
                norm = RecognizedNorm(center, epsilon, names[0], offset, bias, out_dtype)
                errors = (
                    np.max(np.abs(_norm(norm, size * rows, values) - given))
                    for size, given in outputs.items()
                )
                if all(error < 8 * max(rough, 1e-6) for error in errors):
                    return norm
    return None


def _norm(norm: RecognizedNorm, x: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
    x = x - np.mean(x, axis=-1, keepdims=True) if norm.center else x
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.epsilon)
    y = y * (values[norm.scale] + norm.offset)
    return y if norm.bias is None else y + values[norm.bias]


def _dtypes(module: nn.Module) -> list[Any]:
    """16-bit dtypes among the module's fields, to which it may round."""
    found = (v for v in vars(module).values() if isinstance(v, type | np.dtype))
    return [v for v in found if v in (jnp.float16, jnp.bfloat16)]


def _floats(module: nn.Module) -> list[float]:
    """Numbers that may be the epsilon, from the module's fields and from its config's."""
    held = [vars(module), *(vars(v) for v in vars(module).values() if hasattr(v, "__dict__"))]
    found = (v for each in held for v in each.values() if isinstance(v, float))
    return list(dict.fromkeys(v for v in found if 0 < v < 0.5))
