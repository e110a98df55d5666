"""Norms differentiated from their output, which the next Dense keeps anyway (MS-BP).

With y = (x - mean) r and r = 1 / std, the backward of a LayerNorm

    dx = r (g - mean(g) - y mean(g y))            (RMSNorm: without mean(g))

needs y and r but not x. With a mask m, of n positions in the row, the statistics are those of the
masked positions, and the means become m sum(g) / n and m sum(g y) / n, the sums over the whole
row. Source: LowMemoryBP (arXiv:2406.16282), section 5.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float

from lowmembp_jax import kernel_calls
from lowmembp_jax.arrays import alike, compute_dtype, real_array
from lowmembp_jax.checkpointing import NORM_OUTPUT, NORM_RSTD
from lowmembp_jax.implementations import choose_implementation

Residual = Literal["normalized", "output"]
RESIDUALS: tuple[str, ...] = get_args(Residual)


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

    def keeps_output(self, scale, bias) -> bool:
        return self.residual == "output" or (scale is None and bias is None)


def check_residual(residual: str) -> None:
    """Raises ValueError unless `residual` is one of `RESIDUALS`."""
    if residual not in RESIDUALS:
        raise ValueError(
            f"residual={residual!r} is not known: accepted are {', '.join(map(repr, RESIDUALS))}"
        )


def normalize(
    spec: NormSpec,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: ArrayLike | None = None,
) -> Array:
    """The norm of x over `spec.axes`; scale and bias are of x's rank, 1 on other axes.

    Raises ValueError where `mask` does not broadcast to x, or a kernel has no such norm.
    """
    if mask is not None:
        given, mask = jnp.shape(mask), jnp.asarray(mask, bool)
        mask = mask.reshape((1,) * (x.ndim - len(given)) + given)
        sizes = zip(mask.shape, x.shape, strict=False)
        if mask.ndim != x.ndim or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(f"mask must broadcast to x, {x.shape}, got shape {given}")
    if spec.implementation != "xla":
        split = any(a is not None and a.size != x.shape[-1] for a in (scale, bias))
        if mask is not None or spec.axes != (x.ndim - 1,) or split:
            raise ValueError(
                f"implementation={spec.implementation!r} normalizes over the last axis with "
                f"parameters of that axis and no mask, got reduction axes {spec.axes} of {x.ndim} "
                f"and mask={None if mask is None else mask.shape}: choose 'xla'"
            )
    cast = alike(x, scale, bias, mask)
    # A kernel is partitioned under jit. Without a kernel, calls outside jit run op by op, as those
    # of Flax do: to the same bits.
    return (_normalize if spec.implementation == "xla" else _jitted)(spec, *cast)


def _standardize(spec: NormSpec, x: Array, mask) -> tuple[Array, Array]:
    """x - mean and 1 / std, float32 (float64 for float64)."""
    x = x.astype(compute_dtype(x.dtype))
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True, where=mask)
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


def _row(parameter: Array | None) -> Array | None:
    return None if parameter is None else parameter.reshape(parameter.size)


def _run_kernel(spec: NormSpec, x: Array, scale, bias) -> tuple[Array, Array | None, Array]:
    return kernel_calls.norm_forward(
        x,
        _row(scale),
        _row(bias),
        spec.implementation,
        center=spec.center,
        epsilon=spec.epsilon,
        dtype=spec.dtype,
        keep_normalized=not spec.keeps_output(scale, bias),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(spec: NormSpec, x: Array, scale, bias, mask) -> Array:
    if spec.implementation != "xla":
        return _run_kernel(spec, x, scale, bias)[0]
    return _affine(spec, *_standardize(spec, x, mask), scale, bias)


def _forward(spec: NormSpec, x: Array, scale, bias, mask):
    if spec.implementation != "xla":
        out, normalized, rstd = _run_kernel(spec, x, scale, bias)
    else:
        centered, rstd = _standardize(spec, x, mask)
        out, normalized = _affine(spec, centered, rstd, scale, bias), None
        if not spec.keeps_output(scale, bias):
            normalized = (centered * rstd).astype(spec.dtype)
        # Without the barrier XLA would compute y again in the backward from x, and so keep x.
        out, normalized, rstd = lax.optimization_barrier((out, normalized, rstd))
    if normalized is None:
        # The residual is the very array that is returned: a cast in between would be a copy.
        out = kept = checkpoint_name(out, NORM_OUTPUT)
    else:
        kept = checkpoint_name(normalized, NORM_OUTPUT)
    return out, (kept, checkpoint_name(rstd, NORM_RSTD), scale, bias, mask)


def _backward(spec: NormSpec, residuals, g: Array):
    kept, rstd, scale, bias, mask = residuals
    recover = spec.keeps_output(scale, bias)
    if spec.implementation != "xla":
        static = dict(center=spec.center, x_dtype=spec.x_dtype, recover=recover)
        rows = (kept, rstd, g, _row(scale), _row(bias))
        dx, *sums = kernel_calls.norm_backward(*rows, spec.implementation, **static)
        shaped = (
            None if gradient is None else gradient.reshape(parameter.shape)
            for gradient, parameter in zip(sums, (scale, bias), strict=True)
        )
        return dx, *shaped, None
    g, y = g.astype(rstd.dtype), kept.astype(rstd.dtype)
    if recover:
        y = y if bias is None else y - bias.astype(y.dtype)
        y = y if scale is None else y / scale.astype(y.dtype)
    d_scale = None if scale is None else _sum_like(g * y, scale)
    d_bias = None if bias is None else _sum_like(g, bias)
    g = g if scale is None else g * scale.astype(g.dtype)
    mean = partial(jnp.mean, axis=spec.axes, keepdims=True)
    through_statistics = y * mean(g * y)
    if spec.center:
        through_statistics = through_statistics + mean(g)
    if mask is not None:
        counted = jnp.broadcast_to(mask, g.shape).astype(g.dtype)
        through_statistics = through_statistics * (counted / mean(counted))
    dx = rstd * (g - through_statistics)
    return dx.astype(spec.x_dtype), d_scale, d_bias, None


def _sum_like(x: Array, parameter: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(parameter.shape) if size == 1)
    return jnp.sum(x, axis=axes, keepdims=True).astype(parameter.dtype)


_normalize.defvjp(_forward, _backward)
_jitted = jax.jit(_normalize, static_argnums=0, inline=True)


def _last_axis_norm(center, x, scale, bias, epsilon, dtype, implementation, residual, mask):
    check_residual(residual)
    x = real_array(x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating, got {dtype}")
    width = x.shape[-1:]
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None and jnp.shape(parameter) != width:
            raise ValueError(
                f"{name} must have shape {width}, the last axis of x, got {jnp.shape(parameter)}"
            )
    scale, bias = (
        None if parameter is None else jnp.asarray(parameter).reshape((1,) * (x.ndim - 1) + width)
        for parameter in (scale, bias)
    )
    spec = NormSpec(
        axes=(x.ndim - 1,),
        center=center,
        epsilon=float(epsilon),
        x_dtype=x.dtype,
        dtype=dtype,
        residual=residual,
        implementation=choose_implementation(implementation),
    )
    return normalize(spec, x, scale, bias, mask)


def ms_layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    bias: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "normalized",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """LayerNorm over the last axis, differentiated from its output (MS-LayerNorm).

    Source: LowMemoryBP (arXiv:2406.16282), section 5. Statistics, sums and parameter gradients
    are computed in float32 (float64 for float64 x).

    The backward keeps `rstd` (float32, one a row), the mask, and one array as large as x:

    - neither scale nor bias: the output, in `dtype`. The next Dense keeps the same array, so it
      costs nothing, provided that `dtype` is the dtype in which that Dense computes. Merge an
      affine that exists into that Dense with `lm.merge_norm_affine` to get here.
    - scale or bias, `residual="normalized"`: the normalized x before the affine, in `dtype`.
      All gradients are exact, whatever the values of scale and bias, for one more array than
      without an affine.
    - scale or bias, `residual="output"`: the output, from which y = (output - bias) / scale is
      recovered: no more than without an affine. Exact in exact arithmetic; in `dtype`, y has the
      rounding error of the output times 1 / scale, which is large where abs(scale) is far below
      abs(bias), and a scale of 0 gives NaN gradients.

    Args:
      x: `[*rows, features]`, any floating dtype.
      scale: `[features]` or None.
      bias: `[features]` or None.
      epsilon: added to the variance.
      dtype: of the output, None for x's own. The next Dense's, or nothing is shared with it.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
      residual: what is kept where there is an affine, see above.
      mask: boolean, broadcastable to x, or None: the positions that count for mean and variance,
        as in `nn.LayerNorm`. A row without any is NaN.

    Returns:
      `[*rows, features]` in `dtype`.

    Raises:
      TypeError: complex x, or a `dtype` that is not floating; a kernel is asked for and one of
        them is float64.
      ValueError: x is a scalar; scale or bias is not `[features]`; mask does not broadcast, or a
        kernel is asked for with one; unknown implementation or residual.
      RuntimeError: the implementation cannot run here, and why.
    """
    return _last_axis_norm(True, x, scale, bias, epsilon, dtype, implementation, residual, mask)


def ms_rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "normalized",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """RMSNorm over the last axis, differentiated from its output (MS-RMSNorm).

    As `ms_layer_norm`, arguments, errors and what is kept included, without the mean and
    without a bias. `residual="output"` recovers y = output / scale, which loses nothing but at a
    scale of 0, where gradients are NaN.
    """
    return _last_axis_norm(False, x, scale, None, epsilon, dtype, implementation, residual, mask)
