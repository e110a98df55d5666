"""What `lora.py` mends of qwix 0.1.8: how weights are quantized, and what a product keeps."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax import lax
from qwix._src.utils.flax_util import find_param

#: Weights of one output that share a scale of NF4, or the largest divisor of it that fits.
BLOCK = 64


class Provider(qwix.LoraProvider):
    """Of LoRA, whose frozen weights are in NF4 where a rule says so."""

    def __init__(self, rules):
        super().__init__(rules)
        # What PtqProvider takes as arguments and LoraProvider, one of its kind, does not pass on.
        self._qarray_module = SimpleNamespace(quantize=quantize)
        self._dot_general_fn = _dot_general

    def dot_general(self, lhs, rhs, *args, **kwargs):
        rule, _ = self._get_current_rule_and_op_id("dot_general", only_rule=True)
        others = None if isinstance(rhs, jax.Array | np.ndarray) else type(rhs)
        if isinstance(rule, qwix.LoraRule) and find_param(rhs, others) is None:
            # qwix would leave LoRA out and say nothing.
            raise ValueError(
                "LoRA does not find the weight among the module's parameters: they must be "
                "jax.Arrays, as jax.tree.map(jnp.asarray, params) makes of NumPy's"
            )
        if rule is not None and rule.weight_qtype is not None and isinstance(rhs, jax.Array):
            # Initializing. qwix replaces the weight and then looks for it by its shape, unless
            # it is a reshape of another, as DenseGeneral's first values are. It looks no further
            # than an op of two arguments.
            rhs = lax.optimization_barrier((lhs, rhs))[1]
        return super().dot_general(lhs, rhs, *args, **kwargs)


def quantize(weight: jax.Array, how: Any) -> Any:
    """Blocks of `BLOCK` inputs along the last axis of inputs, as QLoRA has them.

    qwix would share one scale among all heads of the Dense after attention.
    """
    *others, last = (axis for axis in range(weight.ndim) if axis not in how.channelwise_axes)
    tiles = dict.fromkeys(others, 1) | {last: math.gcd(BLOCK, weight.shape[last])}
    return qwix.quantize(
        weight.astype(jnp.float32),
        how.qtype,
        channelwise_axes=how.channelwise_axes,
        tiled_axes=tiles,
        scale_dtype=weight.dtype,
    )


def _dot_general(x, weight, dimension_numbers, **kwargs):
    """The product, from whose forward the backward keeps the 4-bit weight and nothing else.

    Differentiated by JAX it would keep the weight in 16 bits, all layers' of them.
    """
    inputs = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def dot(x, weight):
        return qwix.dot_general(x, weight, dimension_numbers, **kwargs)

    def backward(weight, g):
        # XLA would find that it has the 16 bits from the forward, and keep them.
        weight, g = lax.optimization_barrier((weight, g))
        return *jax.linear_transpose(lambda x: dot(x, weight), inputs)(g), None

    product = jax.custom_vjp(dot)
    product.defvjp(lambda x, weight: (dot(x, weight), weight), backward)
    return product(x, weight)
