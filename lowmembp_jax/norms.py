"""Norms differentiated from their output, which the next Dense keeps anyway (MS-BP)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lowmembp_jax.arrays import real_array
from lowmembp_jax.implementations import choose_implementation
from lowmembp_jax.normalization import NormSpec, Residual, check_residual, normalize


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
