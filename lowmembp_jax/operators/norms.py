"""Norms that are differentiated from their output (MS-BP).

With y = (x - mean) r and r = 1 / std, the backward of a LayerNorm

    dx = r (g - mean(g) - y mean(g y))            (RMSNorm: without mean(g))

needs y and r but not x. A mask m that selects n positions of a row restricts the statistics to
them. The means become m sum(g) / n and m sum(g y) / n, with sums over the whole row. Source:
LowMemoryBP (arXiv:2406.16282), section 5.

With a scale and a bias the output is y scale + bias, and the backward recomputes y from it. If the
gradient of the scale needs y, the backward reads x or a copy of y instead.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Bool, Float

from lowmembp_jax._arguments import (
    alike,
    as_array,
    as_choice,
    as_float_dtype,
    as_number,
    call_custom_vjp,
    compute_dtype,
    real_array,
)
from lowmembp_jax._tiling import resharded
from lowmembp_jax.kernels import calls as kernel_calls
from lowmembp_jax.kernels.implementations import choose_implementation
from lowmembp_jax.kernels.partitioning import with_whole_rows
from lowmembp_jax.policies import NORM_AFFINE_OUTPUT, NORM_OUTPUT, NORM_RSTD
from pallas_kernels.row_norm import recovery

Residual = Literal["auto", "normalized", "output"]
RESIDUALS: tuple[str, ...] = get_args(Residual)


@dataclass(frozen=True)
class NormSpec:
    """The static arguments of a norm.

    Attributes:
      axes: the reduction axes.
      center: whether to subtract the mean: True for LayerNorm, False for RMSNorm.
      x_dtype: the dtype of the input.
      dtype: the dtype of the output.
      fast_variance: compute the variance as E x^2 - (E x)^2 (`use_fast_variance` of Flax).
    """

    axes: tuple[int, ...]
    center: bool
    epsilon: float
    x_dtype: jnp.dtype
    dtype: jnp.dtype
    fast_variance: bool = False
    residual: str = "auto"
    implementation: str = "xla"

    def __post_init__(self):
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon: expected a finite number from 0 on, got {self.epsilon}")

    def kept(self, scale, trains_scale: bool) -> Literal["output", "input", "normalized"]:
        """Chooses the array that the backward reads."""
        if self.residual == "output" or (self.residual == "normalized" and scale is None):
            return "output"
        x, out = self.x_dtype.itemsize, self.dtype.itemsize
        is_free = self.residual == "auto" and self.implementation == "xla"
        if trains_scale or self.residual == "normalized":
            return "input" if is_free and x <= out else "normalized"
        return "input" if is_free and x < out else "output"


def check_residual(residual: str) -> None:
    """Raises ValueError unless `residual` is one of `RESIDUALS`."""
    as_choice(residual, "residual", RESIDUALS)


def normalize(
    spec: NormSpec,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: ArrayLike | None = None,
) -> Array:
    """Normalizes x over `spec.axes`.

    Scale and bias have x's rank, with size 1 on all axes that are not features.

    Raises:
      ValueError: `mask` does not broadcast to x; the kernels do not support this norm.
    """
    if mask is not None:
        mask = real_array(mask, "mask") != 0
        given = mask.shape
        mask = mask.reshape((1,) * (x.ndim - len(given)) + given)
        sizes = zip(mask.shape, x.shape, strict=False)
        if mask.ndim != x.ndim or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(
                f"mask: expected a shape that broadcasts to the shape of x, {x.shape}, got {given}"
            )
    if spec.implementation != "xla":
        split = any(a is not None and a.size != x.shape[-1] for a in (scale, bias))
        if mask is not None or spec.axes != (x.ndim - 1,) or split:
            raise ValueError(
                f"implementation: {spec.implementation!r} normalizes only over the last axis, with "
                f"parameters of that axis and no mask, got reduction axes {spec.axes} of {x.ndim} "
                f"and mask={None if mask is None else mask.shape}; choose 'xla'"
            )
    if scale is None and bias is not None:  # saves the rules one case
        scale = jnp.ones_like(bias)
    cast = alike(x, scale, bias, mask)
    # A kernel is partitioned under jit. Without a kernel, calls outside jit run op by op and give
    # the same bits as Flax's norms.
    rule = partial(_normalize, spec)
    if spec.implementation != "xla":
        rule = partial(with_whole_rows, partial(_jitted, spec))
    return call_custom_vjp("lm.ms_layer_norm" if spec.center else "lm.ms_rms_norm", rule, *cast)


def _standardize(spec: NormSpec, x: Array, mask) -> tuple[Array, Array | None, Array]:
    """Returns x - mean, the mean (None for RMSNorm) and 1 / std, float32 (float64 for float64)."""
    x = x.astype(compute_dtype(x.dtype))
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True, where=mask)
    mu = mean(x) if spec.center else None
    if mu is not None and spec.fast_variance:
        variance = jnp.maximum(mean(lax.square(x)) - lax.square(mu), 0)
    else:
        variance = mean(lax.square(x if mu is None else x - mu))
    rstd = lax.rsqrt(variance + jnp.asarray(spec.epsilon, variance.dtype))
    return x if mu is None else x - mu, mu, rstd


def _affine(spec: NormSpec, x: Array, rstd: Array, scale, bias) -> Array:
    """Computes the output from centered x, multiplied in the order of `nn.LayerNorm`."""
    y = x * (rstd if scale is None else rstd * scale.astype(rstd.dtype))
    return (y if bias is None else y + bias.astype(y.dtype)).astype(spec.dtype)


def _row(parameter: Array | None) -> Array | None:
    return None if parameter is None else parameter.reshape(parameter.size)


def _run_kernel(spec: NormSpec, x: Array, scale, bias, keep_normalized: bool):
    """Returns the output, the normalized x or None, and rstd."""
    return kernel_calls.norm_forward(
        x,
        _row(scale),
        _row(bias),
        spec.implementation,
        center=spec.center,
        epsilon=spec.epsilon,
        dtype=spec.dtype,
        keep_normalized=keep_normalized,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(spec: NormSpec, x: Array, scale, bias, mask) -> Array:
    if spec.implementation != "xla":
        return _run_kernel(spec, x, scale, bias, False)[0]
    centered, _, rstd = _standardize(spec, x, mask)
    return _affine(spec, centered, rstd, scale, bias)


def _forward(spec: NormSpec, *primals):
    given: list[Any] = [None if p is None else p.value for p in primals]
    x, scale, bias, mask = given
    kind = spec.kept(scale, scale is not None and primals[1].perturbed)
    mean = None
    if spec.implementation != "xla":
        out, normalized, rstd = _run_kernel(spec, x, scale, bias, kind == "normalized")
    else:
        centered, mean, rstd = _standardize(spec, x, mask)
        out, normalized = _affine(spec, centered, rstd, scale, bias), None
        if kind == "normalized":
            normalized = (centered * rstd).astype(spec.dtype)
        if kind != "input":
            # Without the barrier XLA would keep x and recompute y from it in the backward.
            out, normalized, rstd = lax.optimization_barrier((out, normalized, rstd))
    if kind == "input":  # without names, because a policy that saves them would save x twice
        return out, ({kind: x}, (rstd, mean), scale, bias, mask)
    if kind == "output":
        # The residual is the returned array itself; a cast would make a copy.
        name = NORM_OUTPUT if scale is None else NORM_AFFINE_OUTPUT
        out = normalized = checkpoint_name(out, name)
    else:
        normalized = checkpoint_name(normalized, NORM_OUTPUT)
    return out, ({kind: normalized}, checkpoint_name(rstd, NORM_RSTD), scale, bias, mask)


def _backward(spec: NormSpec, residuals, g: Any):
    [(kind, kept)], rstd, scale, bias, mask = residuals[0].items(), *residuals[1:]
    if isinstance(g, SymbolicZero):
        aval: Any = g.aval
        g = jnp.zeros(aval.shape, aval.dtype)
    inverse = None
    if kind == "output" and scale is not None:
        wide = compute_dtype(spec.dtype)
        shift = None if bias is None else bias.astype(wide)
        inverse = recovery(scale.astype(wide), shift, spec.dtype)
    if spec.implementation != "xla":
        static = dict(center=spec.center, x_dtype=spec.x_dtype, recover=kind == "output")
        rows = (kept, rstd, g, _row(scale), _row(bias))
        dx, *sums = kernel_calls.norm_backward(*rows, spec.implementation, **static)
        d_scale, d_bias = (
            None if gradient is None or parameter is None else gradient.reshape(parameter.shape)
            for gradient, parameter in zip(sums, (scale, bias), strict=True)
        )
    else:
        y = kept
        if kind == "input":
            rstd, mean = rstd
            y = y.astype(rstd.dtype)
            y = (y if mean is None else y - mean) * rstd
        g, y = g.astype(rstd.dtype), y.astype(rstd.dtype)
        if kind == "output":
            y = y if bias is None else y - bias.astype(y.dtype)
            y = y if inverse is None else y * inverse.astype(y.dtype)
        d_scale = None if scale is None else _sum_like(g * y, scale)
        d_bias = None if bias is None else _sum_like(g, bias)
        g = g if scale is None else g * scale.astype(g.dtype)
        dx = _input_gradient(spec, y, rstd, g, mask).astype(spec.x_dtype)
    if inverse is not None and scale is not None and d_scale is not None:
        # The output holds at most half of y. A NaN is better than a wrong gradient.
        is_lost = ~(inverse * scale.astype(inverse.dtype) > 0.5)
        d_scale = jnp.where(is_lost, jnp.nan, d_scale).astype(d_scale.dtype)
    return dx, d_scale, d_bias, None


def _input_gradient(spec: NormSpec, y: Array, rstd: Array, g: Array, mask) -> Array:
    """Computes dx from the cotangent of y."""
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True)
    through_statistics = y * mean(g * y)
    if spec.center:
        through_statistics = through_statistics + mean(g)
    if mask is not None:
        counted = jnp.broadcast_to(mask, g.shape).astype(g.dtype)
        through_statistics = through_statistics * (counted / mean(counted))
    return rstd * (g - through_statistics)


def _sum_like(x: Array, parameter: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(parameter.shape) if size == 1)
    total = jnp.sum(x, axis=axes, keepdims=True).astype(parameter.dtype)
    # The parameter may be whole on every device, although its axis of x is sharded.
    return resharded(total, jax.typeof(parameter).sharding.spec)


_normalize.defvjp(_forward, _backward, symbolic_zeros=True)
_jitted = jax.jit(_normalize, static_argnums=0, inline=True)


def _last_axis_norm(center, x, scale, bias, epsilon, dtype, implementation, residual, mask):
    check_residual(residual)
    x = real_array(x)
    if x.ndim == 0:
        raise ValueError("x: expected at least one axis, got a scalar")
    dtype = jnp.dtype(x.dtype) if dtype is None else as_float_dtype(dtype, "dtype")
    width, affine = x.shape[-1:], []
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None:
            parameter = as_array(parameter, name)
            if parameter.shape != width:
                raise ValueError(
                    f"{name}: expected shape {width}, the last axis of x, got {parameter.shape}"
                )
            parameter = parameter.reshape((1,) * (x.ndim - 1) + width)
        affine.append(parameter)
    spec = NormSpec(
        axes=(x.ndim - 1,),
        center=center,
        epsilon=as_number(epsilon, "epsilon"),
        x_dtype=x.dtype,
        dtype=dtype,
        residual=residual,
        implementation=choose_implementation(implementation),
    )
    scale, bias = affine
    return normalize(spec, x, scale, bias, mask)


def ms_layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    bias: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "auto",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """LayerNorm over the last axis, differentiated from its output (MS-LayerNorm).

    Source: LowMemoryBP (arXiv:2406.16282), section 5. Statistics, sums and parameter gradients
    are computed in float32 (float64 for float64 x).

    The residuals are `rstd` (float32, one a row), the mask, and one array as large as x:

    - Without scale and bias, it is the output, in `dtype`. The next Dense saves the same array, so
      it costs nothing, provided that the Dense computes in `dtype`. Merge existing scales and
      biases into that Dense with `lm.merge_norm_affine`.
    - With a differentiated scale, it is x, or the normalized x in `dtype` if that is narrower (and
      with the kernels). All gradients are exact for all values.
    - With a frozen scale, as in LoRA, or with only a bias, it is the output. The backward
      recomputes y = (output - bias) / scale from it. With p = eps abs(bias / scale) and the eps of
      `dtype`, the error of y is at most (eps + min(1, p^2)) abs(y) + min(p, 1 / p). If p is small,
      this is the rounding of the output; at a scale of 0 it is y itself. The error of dx is this
      error times rstd mean(g scale y).

    If x is narrower than `dtype`, x is saved in each case, and all gradients are exact.

    With a scale or a bias, `residual="normalized"` saves the normalized x, and "output" saves the
    output, also for a differentiated scale. With "output", the gradient of a channel of the scale
    is NaN if the output has lost y: eps abs(bias) + tiny >= abs(scale), where tiny is the smallest
    normal number of `dtype`.

    Args:
      x: `[*rows, features]`, any floating dtype.
      scale: `[features]` or None.
      bias: `[features]` or None.
      epsilon: added to the variance.
      dtype: the dtype of the output, None for x's dtype. Use the dtype of the next Dense, or the
        two share no residual.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
      residual: "auto", "normalized" or "output": which array to save if there is a scale or bias,
        see above.
      mask: boolean, broadcastable to x, or None: the positions that count for mean and variance,
        as in `nn.LayerNorm`. A row without such positions is NaN.

    Returns:
      `[*rows, features]` in `dtype`.

    Raises:
      TypeError: x is complex; `dtype` is not floating; x or `dtype` is float64 and the
        implementation is a kernel.
      ValueError: x is a scalar; scale or bias is not `[features]`; epsilon is negative or not
        finite; mask does not broadcast, or is used with a kernel; implementation or residual is
        unknown.
      RuntimeError: the implementation cannot run here.
    """
    return _last_axis_norm(True, x, scale, bias, epsilon, dtype, implementation, residual, mask)


def ms_rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "auto",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """RMSNorm over the last axis, differentiated from its output (MS-RMSNorm).

    It is `ms_layer_norm` without the mean and without a bias. Arguments, residuals and errors are
    the same.
    """
    return _last_axis_norm(False, x, scale, None, epsilon, dtype, implementation, residual, mask)
