"""LayerNorm after the residual sum, whose affine may be merged into the next Denses.

Post-LN layers compute x = norm(x + f(x)). The Denses and the next residual sum read the output. If
the affine is merged into the Denses (`lm.merge_norm_affine` with `keep`), they read y, the plain
normalized array. The residual sum then reads y * scale + bias. The backward needs only y, which the
Denses save anyway, and all gradients are exact.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from lowmembp_examples.models.common import Compute, layer_norm

#: (x, None), or (y, (scale, bias)) if x = y * scale + bias is not computed yet.
Hidden = tuple[Float[Array, "batch tokens hidden"], Any]


def post_norm(
    compute: Compute,
    epsilon: float,
    name: str,
    x: Float[Array, "batch tokens hidden"],
    *,
    merged: bool,
    residual: str,
) -> Hidden:
    """Normalizes x. Call it inside a compact module.

    Args:
      compute: how the model computes.
      epsilon: added to the variance.
      name: the module's name. The module has a scale and a bias in either case.
      x: `[batch, tokens, hidden]`.
      merged: whether to leave the affine out of the output and return it.
      residual: see `lm.MSLayerNorm`; used if not `merged`.
    """
    if merged:
        return _SplitNorm(compute, epsilon, name=name)(x)
    return layer_norm(compute, epsilon, name, residual=residual)(x), None


def with_affine(hidden: Hidden) -> Float[Array, "batch tokens hidden"]:
    """Returns x for the residual sum."""
    y, affine = hidden
    return y if affine is None else _scale_and_shift(y, *affine)


class _SplitNorm(nn.Module):
    compute: Compute
    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens hidden"]) -> Hidden:
        shape, dtype = x.shape[-1:], self.compute.param_dtype
        scale = self.param("scale", nn.initializers.ones, shape, dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, dtype)
        return layer_norm(self.compute, self.epsilon, "plain", affine=False)(x), (scale, bias)


# Without jax.checkpoint, the product would save the scale as an array of y's shape.
@partial(jax.checkpoint, prevent_cse=False)
def _scale_and_shift(y, scale, bias):
    scale, bias = (jnp.broadcast_to(p.astype(y.dtype), y.shape) for p in (scale, bias))
    return y * scale + bias
