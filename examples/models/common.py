"""What the models share: one name decides which ops they run and what they recompute."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import lowmembp_jax as lm

#: How a model saves memory. Values are those of plain Flax; gradients are approximate from
#: "compress" on, but for a LLaMA's with "lowmembp", and those of "offload".
Method = Literal[
    "default",
    "norm+activation",
    "dots",
    "full-remat",
    "compress",
    "compress+remat",
    "mesa",
    "lowmembp",
    "lowmembp+remat",
    "offload",
]
#: Those with norms and activations in `jax.checkpoint`.
_REMAT_OPS = ("norm+activation", "mesa")
Attention = Literal["xla", "cudnn", "chunked"]
#: What lowmembp's norms with an affine keep, see `lm.ms_layer_norm`.
NormResidual = Literal["auto", "normalized", "output"]


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model computes, apart from its sizes.

    Attributes:
      method: "default", Flax as it comes; "norm+activation", those two in `jax.checkpoint`;
        "dots", each layer in `jax.checkpoint` keeping matrix products; "full-remat", each layer
        keeping nothing; "compress", each layer in `lm.compress`, which stores matrix products and
        its input in 8 bits, and "compress+remat", its input alone; "mesa", all that a layer of
        "norm+activation" keeps in int8, as Mesa does (arXiv:2111.11124); "lowmembp", the ops of
        lowmembp_jax; "lowmembp+remat", those in `jax.checkpoint` with `lm.checkpoint_policy()`;
        "offload", each layer in `jax.checkpoint` with the products of its Denses in the memory of
        the host.
      dtype: of the computation.
      param_dtype: of the parameters.
      attention: implementation, see `models.attention`.
      merged: norms have no affine of their own: `lm.merge_norm_affine` with the model's rules has
        put it into the Denses.
      compress_dtype: what "compress" and "compress+remat" store in, see `lm.compress`.
      bits: that the activations of "lowmembp" keep, 2 or 4; None: 2, by the published tables. The
        gated unit of a LLaMA has none: it is exact.
    """

    method: Method = "default"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attention: Attention = "xla"
    merged: bool = False
    compress_dtype: Any = jnp.float8_e4m3fn
    bits: int | None = 2

    @property
    def lowmembp(self) -> bool:
        return self.method.startswith("lowmembp")


def layer_norm(compute: Compute, epsilon: float, name: str, *, affine: bool = True, **kwargs):
    """A LayerNorm module; `kwargs` are more fields of `lm.MSLayerNorm`, such as `residual`."""
    return _norm(compute, nn.LayerNorm, lm.MSLayerNorm, kwargs)(
        epsilon=epsilon,
        dtype=compute.dtype,
        param_dtype=compute.param_dtype,
        use_scale=affine,
        use_bias=affine,
        name=name,
    )


def rms_norm(compute: Compute, epsilon: float, name: str, *, affine: bool = True, **kwargs):
    """An RMSNorm module; `kwargs` are more fields of `lm.MSRMSNorm`, such as `residual`."""
    return _norm(compute, nn.RMSNorm, lm.MSRMSNorm, kwargs)(
        epsilon=epsilon,
        dtype=compute.dtype,
        param_dtype=compute.param_dtype,
        use_scale=affine,
        name=name,
    )


def _norm(compute: Compute, flax_norm, ms_norm, ms_kwargs):
    # The output dtype is the one in which the next Dense computes: they keep one array then.
    if compute.lowmembp:
        return lambda **fields: ms_norm(**fields, **ms_kwargs)
    return nn.remat(flax_norm) if compute.method in _REMAT_OPS else flax_norm


def gelu(
    compute: Compute, x: Float[Array, "*shape"], *, approximate: bool
) -> Float[Array, "*shape"]:
    if compute.lowmembp:
        published = compute.bits is None
        return lm.regelu2(x, approximate) if published else lm.gelu(x, approximate, compute.bits)
    return _activation(compute, lambda x: nn.gelu(x, approximate), x)


def swiglu(
    compute: Compute, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    return lm.swiglu(gate, up) if compute.lowmembp else _activation(compute, nn.silu, gate) * up


def _activation(compute: Compute, function, x):
    return jax.checkpoint(function)(x) if compute.method in _REMAT_OPS else function(x)


def remat_layer(layer: type[nn.Module], compute: Compute, **kwargs) -> type[nn.Module]:
    """The class of a layer, in `jax.checkpoint` or `lm.compress` where the method says so.

    `kwargs` are those of `nn.remat`, such as `prevent_cse=False` inside `nn.scan`.
    """
    nothing = jax.checkpoint_policies.nothing_saveable
    compressed = {"compress": lm.products_saveable, "compress+remat": nothing, "mesa": None}
    policies = {
        "dots": jax.checkpoint_policies.dots_saveable,
        "full-remat": nothing,
        "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "lowmembp+remat": lm.checkpoint_policy(),
    }
    if compute.method in compressed:
        dtype = jnp.int8 if compute.method == "mesa" else compute.compress_dtype
        return lm.compress_module(layer, dtype=dtype, policy=compressed[compute.method])
    if compute.method in policies:
        return nn.remat(layer, policy=policies[compute.method], **kwargs)
    return layer
