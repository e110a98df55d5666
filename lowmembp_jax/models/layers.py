"""Code that the models share. A method's name decides which ops they run and recompute."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import lowmembp_jax as lm
from lowmembp_jax.models.methods import TABLE

Attention = Literal["xla", "cudnn"]
#: The residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
NormResidual = Literal["auto", "normalized", "output"]


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model computes, apart from its sizes.

    Attributes:
      method: one of the names in `models.methods.TABLE`:
        "default": plain Flax.
        "norm+activation": norms and activations in `jax.checkpoint`.
        "dots": each layer in `jax.checkpoint`, which saves matrix products.
        "products": the same, and saves attention (`lm.products_saveable`).
        "full-remat": each layer in `jax.checkpoint`, which saves only the layer's input.
        "compress": each layer in `lm.compress`, which stores its products and input in 8 bits.
        "compress+remat": the same, but saves only the input.
        "lowmembp": the operators of lowmembp_jax.
        "lowmembp+remat": the same in `jax.checkpoint` with `lm.checkpoint_policy()`.
        "lowmembp+compress": the same with each layer's residuals in `lm.compress`.
        "offload": each layer in `jax.checkpoint`, with its Denses' products in the host's memory.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      attention: implementation, see `models.attention`.
      merged: whether `lm.merge_norm_affine` has merged the norms' affine into the Denses, so that
        norms have none.
      compress_dtype: storage dtype for the methods with `lm.compress`.
      bits: bits an element, 2 or 4, that the activations of "lowmembp" save. None stands for 2 bits
        with the published tables. The gated unit of a LLaMA ignores it, because it is exact.
      sharding: the sharding of each layer's input, which divides its examples over devices. Without
        it, XLA computes the attention of scanned layers on every device for all examples, if
        parameters are divided.
    """

    method: str = "default"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attention: Attention = "xla"
    merged: bool = False
    compress_dtype: Any = "float8"
    bits: int | None = 2
    sharding: jax.sharding.NamedSharding | None = None

    def __post_init__(self):
        if self.method not in TABLE:
            raise ValueError(
                f"Compute: method: expected one of {', '.join(TABLE)}, got {self.method!r}"
            )

    @property
    def lowmembp(self) -> bool:
        return TABLE[self.method].operators == "lowmembp"

    @property
    def checkpointed(self) -> bool:
        return TABLE[self.method].operators == "checkpointed"


def layer_norm(compute: Compute, epsilon: float, name: str, *, affine: bool = True, **kwargs):
    """Makes a LayerNorm. `kwargs` are more fields of `lm.MSLayerNorm`, such as `residual`."""
    return _norm(compute, nn.LayerNorm, lm.MSLayerNorm, kwargs)(
        epsilon=epsilon,
        dtype=compute.dtype,
        param_dtype=compute.param_dtype,
        use_scale=affine,
        use_bias=affine,
        name=name,
    )


def rms_norm(
    compute: Compute,
    epsilon: float,
    name: str,
    *,
    affine: bool = True,
    zero_centered: bool = False,
    **kwargs,
):
    """Makes an RMSNorm. `kwargs` are more fields of `lm.MSRMSNorm`, such as `residual`.

    With `zero_centered` it multiplies by 1 + scale, as in Gemma, and ignores `affine`.
    """
    if zero_centered:
        return ZeroCenteredRMSNorm(compute, epsilon, name=name, **kwargs)
    return _norm(compute, nn.RMSNorm, lm.MSRMSNorm, kwargs)(
        epsilon=epsilon,
        dtype=compute.dtype,
        param_dtype=compute.param_dtype,
        use_scale=affine,
        name=name,
    )


def _norm(compute: Compute, flax_norm, ms_norm, ms_kwargs):
    # The output has the dtype of the next Dense, so that the two share one residual.
    if compute.lowmembp:
        return lambda **fields: ms_norm(**fields, **ms_kwargs)
    return nn.remat(flax_norm) if compute.checkpointed else flax_norm


class ZeroCenteredRMSNorm(nn.Module):
    """Computes x / rms(x) (1 + scale) in float32."""

    compute: Compute
    epsilon: float
    residual: NormResidual = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        compute = self.compute
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:], compute.param_dtype)
        fields = {"epsilon": self.epsilon, "dtype": compute.dtype}
        if compute.lowmembp:
            norm = partial(lm.ms_rms_norm, **fields, residual=self.residual)
        else:
            norm = partial(_rms_norm, **fields)
            norm = jax.checkpoint(norm) if compute.checkpointed else norm
        return norm(x, 1 + scale.astype(jnp.float32))


def _rms_norm(x, scale, *, epsilon, dtype):
    x = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x * jax.lax.rsqrt(mean + epsilon) * scale).astype(dtype)


def gelu(
    compute: Compute, x: Float[Array, "*shape"], *, approximate: bool
) -> Float[Array, "*shape"]:
    if compute.lowmembp:
        if compute.bits is None:
            return lm.regelu2(x, approximate)
        return lm.gelu(x, approximate, compute.bits)
    return _activation(compute, lambda x: nn.gelu(x, approximate), x)


def swiglu(
    compute: Compute, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    return lm.swiglu(gate, up) if compute.lowmembp else _activation(compute, nn.silu, gate) * up


def geglu(
    compute: Compute, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    return lm.geglu(gate, up) if compute.lowmembp else _activation(compute, nn.gelu, gate) * up


def _activation(compute: Compute, function, x):
    return jax.checkpoint(function)(x) if compute.checkpointed else function(x)


def remat_layer(
    layer: type[nn.Module], compute: Compute, *, scanned: bool = False
) -> type[nn.Module]:
    """Wraps a layer's class in `jax.checkpoint` or `lm.compress` if the method says so.

    `scanned`: whether the layer is the body of a loop with more than one step. XLA removes a loop
    of one step and would then merge the recomputation with the first computation.
    """
    how = TABLE[compute.method]
    if how.layer == "compress":
        return lm.compress_module(layer, dtype=compute.compress_dtype, **how.options())
    if how.layer == "remat":
        return nn.remat(layer, prevent_cse=not scanned, **how.options())
    return layer


def run_layers(
    layer: Callable[..., nn.Module],
    count: int,
    scan: bool,
    compute: Compute,
    x: Any,
    *args: Any,
    each: Sequence[Any] = (),
) -> Any:
    """Runs x through all layers. Call it inside a compact module.

    Args:
      layer: makes a layer from a `name`. The layer takes x, `args` and its own rows of `each`, and
        returns the next layer's x.
      count: the number of layers.
      scan: whether to use one `nn.scan`, which compiles in the time of one layer. Parameters are
        stacked under "layers" instead of "layer_0", "layer_1", ...
      compute: has the sharding of each layer's input.
      x: the first layer's input.
      *args: arguments for all layers.
      each: arrays with a leading axis of layers.
    """
    divided = partial(divide, sharding=compute.sharding)
    if not scan:
        for index in range(count):
            x = layer(name=f"layer_{index}")(divided(x), *args, *(rows[index] for rows in each))
        return x
    axes: Any = (nn.broadcast,) * len(args) + (0,) * len(each)
    run = nn.scan(
        lambda module, x, *args: (module(divided(x), *args), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=axes,
        length=count,
    )
    return run(layer(name="layers"), x, *args, *map(jnp.asarray, each))[0]


def divide(x: Any, sharding: jax.sharding.NamedSharding | None) -> Any:
    """Divides the examples in arrays [batch, ..., hidden] of a tree, unless there are too few."""

    def one(x):
        if sharding is None or x.ndim < 3 or x.shape[0] % sharding.num_devices:
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(one, x)


def checkpoint_index(name: str) -> str:
    """Returns a layer's number in checkpoints' names, see `checkpoints.to_params`."""
    return "{layer}" if name == "layers" else name.removeprefix("layer_")
