"""Code that the models share. A method's name decides which ops they run and recompute."""

import dataclasses
from collections.abc import Sequence
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
      method: one of the names in `models.methods.TABLE`.
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
      tiles: the tokens in a slice of `lm.tile_module`, which runs the parts of a decoder's layer
        that mix no tokens: the norms and projections before and after attention, and the MLP.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
    """

    method: str = "default"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attention: Attention = "xla"
    merged: bool = False
    compress_dtype: Any = "float8"
    bits: int | None = 2
    sharding: jax.sharding.NamedSharding | None = None
    norm_residual: NormResidual = "auto"
    tiles: int | None = None

    def __post_init__(self):
        if self.method not in TABLE:
            raise ValueError(
                f"Compute: method: expected one of {', '.join(TABLE)}, got {self.method!r}"
            )

    @property
    def dtypes(self) -> dict[str, Any]:
        """The fields that all Denses, norms and tables have."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def lowmembp(self) -> bool:
        return TABLE[self.method].operators == "lowmembp"

    @property
    def checkpointed(self) -> bool:
        return TABLE[self.method].operators == "checkpointed"


class Block(nn.Module):
    """A model or a layer: sizes, and how it computes.

    Its submodules come from the functions below, which take the block first.
    """

    config: Any
    compute: Compute


class Model(Block):
    """A whole model whose layers can run in one loop. `scan_layers`: see `run_layers`."""

    scan_layers: bool = False


def dense(block: Block, features: int | tuple[int, ...], name: str, **fields) -> nn.Module:
    """Makes a Dense. `fields` are more fields of `nn.DenseGeneral`."""
    return nn.DenseGeneral(features, name=name, **block.compute.dtypes | fields)


def embed(block: Block, count: int, name: str) -> nn.Embed:
    """Makes a table of `count` rows, each as wide as the model."""
    return nn.Embed(count, block.config.hidden_size, **block.compute.dtypes, name=name)


def patches(block: Block, width: int) -> nn.Conv:
    """Makes a Conv that turns each patch of an image into one vector."""
    dtypes, size = block.compute.dtypes, 2 * (block.config.patch_size,)
    return nn.Conv(width, size, size, padding="VALID", **dtypes, name="patch_embedding")


def layer_norm(block: Block, name: str, *, merges: bool = True, epsilon: float | None = None):
    """Makes a LayerNorm. `merges`: whether `compute.merged` takes its scale and bias away."""
    affine = not (merges and block.compute.merged)
    fields = {"use_scale": affine, "use_bias": affine}
    epsilon = epsilon or block.config.layer_norm_eps
    return _norm(block, nn.LayerNorm, lm.MSLayerNorm, name=name, epsilon=epsilon, **fields)


def rms_norm(block: Block, name: str, *, merges: bool = True, **fields: Any):
    """Makes an RMSNorm. `merges` is as in `layer_norm`. `fields` are more fields of the module."""
    affine, epsilon = not (merges and block.compute.merged), block.config.rms_norm_eps
    fields |= {"name": name, "epsilon": epsilon, "use_scale": affine}
    return _norm(block, nn.RMSNorm, lm.MSRMSNorm, **fields)


def _norm(block, flax_norm, ms_norm, **fields):
    compute = block.compute
    # The output has the dtype of the next Dense, so that the two share one residual.
    fields |= compute.dtypes
    if compute.lowmembp:
        return ms_norm(**fields, residual=compute.norm_residual)
    return (nn.remat(flax_norm) if compute.checkpointed else flax_norm)(**fields)


def gelu(
    compute: Compute, x: Float[Array, "*shape"], *, approximate: bool
) -> Float[Array, "*shape"]:
    if compute.lowmembp:
        if compute.bits is None:
            return lm.regelu2(x, approximate)
        return lm.gelu(x, approximate, compute.bits)
    return _activation(compute, lambda x: nn.gelu(x, approximate), x)


def mlp(
    block: Block, x: Float[Array, "*shape"], width: int, *, approximate: bool = False
) -> Float[Array, "*shape"]:
    """Computes the Dense "intermediate", GELU and the Dense "output"."""
    h = dense(block, width, "intermediate")(x)
    h = gelu(block.compute, h, approximate=approximate)
    return dense(block, x.shape[-1], "output")(h)


def gated(
    compute: Compute, gate: Float[Array, "*shape"], up: Float[Array, "*shape"], *, is_gelu: bool
) -> Float[Array, "*shape"]:
    """Computes silu(gate) up, or gelu(gate) up with the tanh form."""
    if compute.lowmembp:
        return (lm.geglu if is_gelu else lm.swiglu)(gate, up)
    return _activation(compute, nn.gelu if is_gelu else nn.silu, gate) * up


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
        dtype = compute.compress_dtype
        return lm.compress_module(layer, dtype=dtype, prevent_cse=not scanned, **how.options())
    if how.layer == "remat":
        return nn.remat(layer, prevent_cse=not scanned, **how.options())
    return layer


def run_layers(
    model: Model, layer: type[Block], x: Any, *args: Any, each: Sequence[Any] = (), **fields: Any
) -> Any:
    """Runs x through all layers. Call it inside a compact module.

    With `model.scan_layers` it is one `nn.scan`, which compiles in the time of one layer.
    Parameters are then stacked under "layers" instead of "layer_0", "layer_1", ...

    Args:
      model: the model that calls this.
      layer: takes x, `args` and its own rows of `each`, and returns the next layer's x.
      x, *args: the first layer's input, and arguments for all layers.
      each: arrays with a leading axis of layers.
      **fields: more fields of `layer`.
    """
    scan, count = model.scan_layers, model.config.num_hidden_layers
    wrapped = remat_layer(layer, model.compute, scanned=scan)
    make = partial(wrapped, model.config, model.compute, **fields)
    sharding = model.compute.sharding

    def divided(x):
        if sharding is None or x.shape[0] % sharding.num_devices:  # too few examples
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    if not scan:
        for index in range(count):
            x = make(name=f"layer_{index}")(divided(x), *args, *(rows[index] for rows in each))
        return x
    axes: Any = (nn.broadcast,) * len(args) + (0,) * len(each)
    run = nn.scan(
        lambda module, x, *args: (module(divided(x), *args), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=axes,
        length=count,
    )
    return run(make(name="layers"), x, *args, *map(jnp.asarray, each))[0]
