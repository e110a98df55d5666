"""The custom VJP of the norms: differentiated from their output (MS-BP).

With y = (x - mean) r and r = 1 / std, the backward of a LayerNorm

    dx = r (g - mean(g) - y mean(g y))            (RMSNorm: without mean(g))

needs y and r but not x. With a mask m, of n positions in the row, the statistics are those of the
masked positions, and the means become m sum(g) / n and m sum(g y) / n, the sums over the whole
row. Source: LowMemoryBP (arXiv:2406.16282), section 5.

With a scale and a bias the output is y scale + bias. Then y is computed from it again, or, where
the gradient of the scale needs y itself, from x or from a copy of y.
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

from lowmembp_jax._arguments import alike, call_custom_vjp, compute_dtype, real_array
from lowmembp_jax.kernels import calls as kernel_calls
from lowmembp_jax.kernels.implementations import choose_implementation
from lowmembp_jax.kernels.partitioning import with_whole_rows
from lowmembp_jax.policies import NORM_AFFINE_OUTPUT, NORM_OUTPUT, NORM_RSTD
from pallas_kernels.row_norm import recovery

Residual = Literal["auto", "normalized", "output"]
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
    residual: str = "auto"
    implementation: str = "xla"

    def __post_init__(self):
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon must be a finite number from 0 on, got {self.epsilon}")

    def kept(self, scale, trains_scale: bool) -> Literal["output", "input", "normalized"]:
        """Which array the backward reads."""
        if self.residual == "output" or (self.residual == "normalized" and scale is None):
            return "output"
        x, out = self.x_dtype.itemsize, self.dtype.itemsize
        is_free = self.residual == "auto" and self.implementation == "xla"
        if trains_scale or self.residual == "normalized":
            return "input" if is_free and x <= out else "normalized"
        return "input" if is_free and x < out else "output"


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
    if scale is None and bias is not None:  # one case less for the rules
        scale = jnp.ones_like(bias)
    cast = alike(x, scale, bias, mask)
    # A kernel is partitioned under jit. Without a kernel, calls outside jit run op by op, as those
    # of Flax do: to the same bits.
    rule = partial(_normalize, spec)
    if spec.implementation != "xla":
        rule = partial(with_whole_rows, partial(_jitted, spec))
    return call_custom_vjp("lm.ms_layer_norm" if spec.center else "lm.ms_rms_norm", rule, *cast)


def _standardize(spec: NormSpec, x: Array, mask) -> tuple[Array, Array | None, Array]:
    """x - mean, the mean of a LayerNorm and 1 / std, float32 (float64 for float64)."""
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
    """Output from centered x, multiplied in the order of `nn.LayerNorm`."""
    y = x * (rstd if scale is None else rstd * scale.astype(rstd.dtype))
    return (y if bias is None else y + bias.astype(y.dtype)).astype(spec.dtype)


def _row(parameter: Array | None) -> Array | None:
    return None if parameter is None else parameter.reshape(parameter.size)


def _run_kernel(spec: NormSpec, x: Array, scale, bias, keep_normalized: bool):
    """Output, the normalized x or None, and rstd."""
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
            # Without the barrier XLA would compute y again in the backward from x, and keep x.
            out, normalized, rstd = lax.optimization_barrier((out, normalized, rstd))
    if kind == "input":  # without names: a policy that keeps them would keep x twice
        return out, ({kind: x}, (rstd, mean), scale, bias, mask)
    if kind == "output":
        # The residual is the very array that is returned: a cast in between would be a copy.
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
        # Half of y at most is in the output: better no gradient than that of the other half.
        is_lost = ~(inverse * scale.astype(inverse.dtype) > 0.5)
        d_scale = jnp.where(is_lost, jnp.nan, d_scale).astype(d_scale.dtype)
    return dx, d_scale, d_bias, None


def _input_gradient(spec: NormSpec, y: Array, rstd: Array, g: Array, mask) -> Array:
    """dx from the cotangent of y."""
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
    return jnp.sum(x, axis=axes, keepdims=True).astype(parameter.dtype)


_normalize.defvjp(_forward, _backward, symbolic_zeros=True)
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
    residual: Residual = "auto",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """LayerNorm over the last axis, differentiated from its output (MS-LayerNorm).

    Source: LowMemoryBP (arXiv:2406.16282), section 5. Statistics, sums and parameter gradients
    are computed in float32 (float64 for float64 x).

    The backward keeps `rstd` (float32, one a row), the mask, and one array as large as x:

    - neither scale nor bias: the output, in `dtype`. The next Dense keeps the same array, so it
      costs nothing, provided that `dtype` is the dtype in which that Dense computes. Merge an
      affine that exists into that Dense with `lm.merge_norm_affine` to get here.
    - a scale that is differentiated: x itself, or the normalized x in `dtype` where that is the
      narrower (and with the kernels). All gradients are exact, whatever the values.
    - a scale that is not, as in LoRA, or a bias alone: the output, as without an affine. From it
      y = (output - bias) / scale is computed again. With p = eps abs(bias / scale), and eps that
      of `dtype`, y is off by at most (eps + min(1, p^2)) abs(y) + min(p, 1 / p): no more than
      the rounding of the output where p is small, and y itself at a scale of 0. dx is off by
      rstd mean(g scale y) times that.

    Where x is narrower than `dtype`, x is kept in each case, and all gradients are exact.

    `residual="normalized"` keeps the normalized x wherever there is an affine, and "output" the
    output, a differentiated scale or not. Then the gradient of a channel of the scale is NaN where
    the output does not hold y any more, eps abs(bias) + tiny >= abs(scale), with the smallest
    normal number of `dtype` for tiny.

    Args:
      x: `[*rows, features]`, any floating dtype.
      scale: `[features]` or None.
      bias: `[features]` or None.
      epsilon: added to the variance.
      dtype: of the output, None for x's own. The next Dense's, or nothing is shared with it.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
      residual: "auto", "normalized" or "output": what is kept where there is an affine, see above.
      mask: boolean, broadcastable to x, or None: the positions that count for mean and variance,
        as in `nn.LayerNorm`. A row without any is NaN.

    Returns:
      `[*rows, features]` in `dtype`.

    Raises:
      TypeError: complex x, or a `dtype` that is not floating; a kernel is asked for and one of
        them is float64.
      ValueError: x is a scalar; scale or bias is not `[features]`; epsilon is negative; mask does
        not broadcast, or a kernel is asked for with one; unknown implementation or residual.
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
    residual: Residual = "auto",
    mask: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*rows features"]:
    """RMSNorm over the last axis, differentiated from its output (MS-RMSNorm).

    As `ms_layer_norm`, arguments, errors and what is kept included, without the mean and
    without a bias.
    """
    return _last_axis_norm(False, x, scale, None, epsilon, dtype, implementation, residual, mask)
