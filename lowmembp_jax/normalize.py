"""The norms' custom differentiation: from the output, not from the input (MS-BP).

With y = (x - mean) r and r = 1 / std, the backward of a norm

    dx = r (g - mean(g) - y mean(g y))            (RMSNorm: without mean(g))

needs y and r but not x. Source: LowMemoryBP (arXiv:2406.16282), section 5.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from lowmembp_jax import kernels
from lowmembp_jax.arrays import compute_dtype
from lowmembp_jax.checkpointing import NORM_OUTPUT, NORM_RSTD
from lowmembp_jax.jax_internals import varying

Residual = Literal["normalized", "output"]
RESIDUALS: tuple[str, ...] = ("normalized", "output")


@dataclass(frozen=True)
class NormSpec:
    """What is static of a norm: `axes` are the reduced ones; dtypes of input and output."""

    axes: tuple[int, ...]
    center: bool
    epsilon: float
    x_dtype: jnp.dtype
    dtype: jnp.dtype
    fast_variance: bool = False
    residual: str = "normalized"
    implementation: str = "xla"


def _standardize(spec: NormSpec, x: Array) -> tuple[Array, Array]:
    """x - mean and 1 / std, float32 (float64 for float64)."""
    x = x.astype(compute_dtype(x.dtype))
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True)
    if not spec.center:
        variance = mean(lax.square(x))
    else:
        mu = mean(x)
        if spec.fast_variance:
            variance = jnp.maximum(mean(lax.square(x)) - lax.square(mu), 0)
        else:
            variance = mean(lax.square(x - mu))
        x = x - mu
    return x, lax.rsqrt(variance + jnp.asarray(spec.epsilon, variance.dtype))


def _affine(spec: NormSpec, x: Array, rstd: Array, scale, bias) -> Array:
    """Output from centered x, multiplied in the order of `nn.LayerNorm`."""
    y = x * (rstd if scale is None else rstd * scale.astype(rstd.dtype))
    return (y if bias is None else y + bias.astype(y.dtype)).astype(spec.dtype)


def normalize(spec: NormSpec, x: Array, scale: Array | None, bias: Array | None) -> Array:
    """The norm of x over `spec.axes`; scale and bias are of x's rank, 1 on other axes."""
    args = (x, scale, bias)
    if spec.implementation != "xla":
        last = (x.ndim - 1,)
        split = any(a is not None and a.size != x.shape[-1] for a in (scale, bias))
        if spec.axes != last or split:
            raise ValueError(
                f"implementation={spec.implementation!r} normalizes over the last axis with "
                f"parameters of that axis, got reduction axes {spec.axes} of {x.ndim}: choose 'xla'"
            )
    # Inside shard_map: parameters that are the same on every device get their gradients summed
    # over the devices by the transpose of this cast.
    axes = varying(*(a for a in args if a is not None))
    cast = (
        a
        if a is None or not (missing := axes - varying(a))
        else lax.pcast(a, tuple(missing), to="varying")
        for a in args
    )
    return _jitted(spec, *cast)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(spec: NormSpec, x: Array, scale: Array | None, bias: Array | None) -> Array:
    if spec.implementation != "xla":
        return _forward_kernel(spec, x, scale, bias)[0]
    return _affine(spec, *_standardize(spec, x), scale, bias)


def _keeps_output(spec: NormSpec, scale, bias) -> bool:
    return spec.residual == "output" or (scale is None and bias is None)


def _forward(spec: NormSpec, x: Array, scale, bias):
    if spec.implementation != "xla":
        return _forward_kernel(spec, x, scale, bias)
    centered, rstd = _standardize(spec, x)
    out = _affine(spec, centered, rstd, scale, bias)
    # The barriers keep XLA from computing y again in the backward from x, and so keeping x.
    # The residual is the very array that is returned: a cast in between would be a copy.
    if _keeps_output(spec, scale, bias):
        out, rstd = lax.optimization_barrier((out, rstd))
        out = kept = checkpoint_name(out, NORM_OUTPUT)
    else:
        normalized = (centered * rstd).astype(spec.dtype)
        normalized, out, rstd = lax.optimization_barrier((normalized, out, rstd))
        kept = checkpoint_name(normalized, NORM_OUTPUT)
    return out, (kept, checkpoint_name(rstd, NORM_RSTD), scale, bias)


def _backward(spec: NormSpec, residuals, g: Array):
    if spec.implementation != "xla":
        return _backward_kernel(spec, residuals, g)
    kept, rstd, scale, bias = residuals
    g, y = g.astype(rstd.dtype), kept.astype(rstd.dtype)
    if _keeps_output(spec, scale, bias):
        y = y if bias is None else y - bias.astype(y.dtype)
        y = y if scale is None else y / scale.astype(y.dtype)
    d_scale = None if scale is None else _sum_like(g * y, scale)
    d_bias = None if bias is None else _sum_like(g, bias)
    g = g if scale is None else g * scale.astype(g.dtype)
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True)
    inner = g - y * mean(g * y)
    if spec.center:
        inner = inner - mean(g)
    return (rstd * inner).astype(spec.x_dtype), d_scale, d_bias


def _sum_like(x: Array, parameter: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(parameter.shape) if size == 1)
    return jnp.sum(x, axis=axes, keepdims=True).astype(parameter.dtype)


def _row(parameter: Array | None) -> Array | None:
    return None if parameter is None else parameter.reshape(parameter.size)


def _forward_kernel(spec: NormSpec, x: Array, scale, bias):
    keeps_output = _keeps_output(spec, scale, bias)
    out, normalized, rstd = kernels.norm_forward(
        x,
        _row(scale),
        _row(bias),
        spec.implementation,
        center=spec.center,
        epsilon=spec.epsilon,
        dtype=spec.dtype,
        keep_normalized=not keeps_output,
    )
    if keeps_output:
        out = kept = checkpoint_name(out, NORM_OUTPUT)
    else:
        kept = checkpoint_name(normalized, NORM_OUTPUT)
    return out, (kept, checkpoint_name(rstd, NORM_RSTD), scale, bias)


def _backward_kernel(spec: NormSpec, residuals, g: Array):
    kept, rstd, scale, bias = residuals
    dx, *sums = kernels.norm_backward(
        kept,
        rstd,
        g,
        _row(scale),
        _row(bias),
        spec.implementation,
        center=spec.center,
        x_dtype=spec.x_dtype,
        recover=_keeps_output(spec, scale, bias),
    )
    shaped = (
        None if gradient is None else gradient.reshape(parameter.shape)
        for gradient, parameter in zip(sums, (scale, bias), strict=True)
    )
    return dx, *shaped


_normalize.defvjp(_forward, _backward)
_jitted = jax.jit(_normalize, static_argnums=0, inline=True)


def check_residual(residual: str) -> None:
    """Raises ValueError unless `residual` is one of `RESIDUALS`."""
    if residual not in RESIDUALS:
        raise ValueError(
            f"residual={residual!r} is not known: accepted are {', '.join(map(repr, RESIDUALS))}"
        )
