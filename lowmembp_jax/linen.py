"""Flax linen modules over the operators: the fields and parameters of those they replace."""

import flax.linen as nn
from jaxtyping import Array, Float

from lowmembp_jax.activations import regelu2, resilu2
from lowmembp_jax.arrays import real_array
from lowmembp_jax.flax_norms import all_axes, check_norm, normalize_as
from lowmembp_jax.implementations import check_implementation


class ReGELU2(nn.Module):
    """`lm.regelu2` as a module: GELU that keeps 2 bits an element for the backward.

    Attributes:
      approximate: the tanh form (True) or the erf form.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    approximate: bool = True
    implementation: str | None = None

    def __post_init__(self):
        check_implementation(self.implementation)
        super().__post_init__()

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return regelu2(x, self.approximate, implementation=self.implementation)


class ReSiLU2(nn.Module):
    """`lm.resilu2` as a module: SiLU that keeps 2 bits an element for the backward.

    Attributes:
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    implementation: str | None = None

    def __post_init__(self):
        check_implementation(self.implementation)
        super().__post_init__()

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return resilu2(x, implementation=self.implementation)


def _apply_norm(norm: nn.Module, x: Array, mask, center: bool, use_bias: bool) -> Array:
    """Creates the parameters as Flax's own norms do and applies `normalize`."""
    x = real_array(x)
    shape = tuple(x.shape[axis] for axis in all_axes(x.ndim, norm.feature_axes))
    scale = bias = None
    if norm.use_scale:
        scale = norm.param("scale", norm.scale_init, shape, norm.param_dtype)
    if use_bias:
        bias = norm.param("bias", norm.bias_init, shape, norm.param_dtype)
    return normalize_as(norm, x, scale, bias, mask, center)


class MSLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, differentiated from its output: see `lm.ms_layer_norm`.

    Fields, parameters, initial values and automatic names (`LayerNorm_0`) are those of
    `nn.LayerNorm`; a checkpoint loads unchanged. Set `dtype` to the dtype of the next Dense, or
    nothing is shared with it.

    Attributes:
      residual: "auto", "normalized" or "output": what is kept where there is an affine.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Raises:
      ValueError: at construction for `axis_name`, `axis_index_groups` and
        `force_float32_reductions=False`; at the call for a `mask` that does not broadcast to x.
    """

    residual: str = "auto"
    implementation: str | None = None

    def __post_init__(self):
        check_norm(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, mask=None) -> Float[Array, "*shape"]:
        return _apply_norm(self, x, mask, center=True, use_bias=self.use_bias)


class MSRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, differentiated from its output: see `lm.ms_rms_norm`.

    Fields, parameters, initial values, automatic names and errors as for `MSLayerNorm`.
    """

    residual: str = "auto"
    implementation: str | None = None

    def __post_init__(self):
        check_norm(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, mask=None) -> Float[Array, "*shape"]:
        return _apply_norm(self, x, mask, center=False, use_bias=False)


# Flax names a module without a name after its class: as LayerNorm_0, an existing checkpoint loads.
MSLayerNorm.__name__ = "LayerNorm"
MSRMSNorm.__name__ = "RMSNorm"
