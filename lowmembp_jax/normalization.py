"""Norms whose backward is written in their output, which the next Dense keeps anyway.

MS-LayerNorm and MS-RMSNorm of LowMemoryBP (arXiv:2406.16282): `normalize.py` has the mathematics.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowmembp_jax.arrays import real_array
from lowmembp_jax.implementations import choose_implementation
from lowmembp_jax.normalize import NormSpec, Residual, check_residual, normalize


def _last_axis_norm(x, scale, bias, *, center, epsilon, dtype, implementation, residual):
    check_residual(residual)
    x = real_array(x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating, got {dtype}")
    rows = (1,) * (x.ndim - 1)
    parameters = []
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None:
            parameter = jnp.asarray(parameter)
            if parameter.shape != x.shape[-1:]:
                raise ValueError(
                    f"{name} must have shape {x.shape[-1:]}, the last axis of x, "
                    f"got {parameter.shape}"
                )
            parameter = parameter.reshape(rows + parameter.shape)
        parameters.append(parameter)
    spec = NormSpec(
        (x.ndim - 1,),
        center,
        float(epsilon),
        x.dtype,
        dtype,
        residual=residual,
        implementation=choose_implementation(implementation),
    )
    return normalize(spec, x, *parameters)


def ms_layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    bias: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "normalized",
) -> Float[Array, "*rows features"]:
    """LayerNorm over the last axis, differentiated from its output (MS-LayerNorm).

    Source: LowMemoryBP (arXiv:2406.16282), section 5. Statistics, sums and parameter gradients
    are computed in float32 (float64 for float64 x).

    What the backward keeps, besides `rstd` (float32, one a row):

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

    Returns:
      `[*rows, features]` in `dtype`.

    Raises:
      TypeError: complex x, or a `dtype` that is not floating; a kernel is asked for and one of
        them is float64.
      ValueError: x is a scalar; scale or bias is not `[features]`; unknown implementation or
        residual.
      RuntimeError: the implementation cannot run here, and why.
    """
    return _last_axis_norm(
        x,
        scale,
        bias,
        center=True,
        epsilon=epsilon,
        dtype=dtype,
        implementation=implementation,
        residual=residual,
    )


def ms_rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    residual: Residual = "normalized",
) -> Float[Array, "*rows features"]:
    """RMSNorm over the last axis, differentiated from its output (MS-RMSNorm).

    As `ms_layer_norm`, arguments, errors and what is kept included, without the mean and
    without a bias. `residual="output"` recovers y = output / scale, which loses nothing but at a
    scale of 0, where gradients are NaN.
    """
    return _last_axis_norm(
        x,
        scale,
        None,
        center=False,
        epsilon=epsilon,
        dtype=dtype,
        implementation=implementation,
        residual=residual,
    )
