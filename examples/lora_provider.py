"""Fixes qwix 0.1.8 for `lora.py`: the blocks of quantized weights and the products' residuals."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax import lax
from qwix._src.utils.flax_util import find_param

#: Weights that share an NF4 scale. Axes that are not a multiple use the greatest common divisor.
BLOCK = 64


class Provider(qwix.LoraProvider):
    """A LoRA provider that stores frozen weights in NF4 if a rule says so."""

    def __init__(self, rules):
        super().__init__(rules)
        # PtqProvider takes these as arguments, but its subclass LoraProvider does not pass them on.
        self._qarray_module = SimpleNamespace(quantize=quantize)
        self._dot_general_fn = _dot_general

    def dot_general(self, lhs, rhs, *args, **kwargs):
        rule, _ = self._get_current_rule_and_op_id("dot_general", only_rule=True)
        others = None if isinstance(rhs, jax.Array | np.ndarray) else type(rhs)
        if isinstance(rule, qwix.LoraRule) and find_param(rhs, others) is None:
            # qwix would silently leave LoRA out.
            raise ValueError(
                "params: LoRA cannot find the weight among the module's parameters: expected "
                "jax.Arrays; convert NumPy arrays with jax.tree.map(jnp.asarray, params)"
            )
        if rule is not None and rule.weight_qtype is not None and isinstance(rhs, jax.Array):
            # During initialization, qwix replaces the weight and then finds it by its shape. If the
            # weight is a reshape of another array, like DenseGeneral's first values, qwix follows
            # the reshape instead. It does not follow an op of two arguments, such as this barrier.
            rhs = lax.optimization_barrier((lhs, rhs))[1]
        return super().dot_general(lhs, rhs, *args, **kwargs)


def quantize(weight: jax.Array, how: Any) -> Any:
    """Quantizes a weight in blocks of `BLOCK` along the last input axis, as QLoRA does.

    qwix itself would use one scale for all heads of the Dense after attention.
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
    """Computes the product and saves only the 4-bit weight for the backward.

    JAX's own derivative would save the weights of all layers in 16 bits.
    """
    inputs = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def dot(x, weight):
        return qwix.dot_general(x, weight, dimension_numbers, **kwargs)

    def backward(weight, g):
        # Without the barrier XLA would keep the 16-bit weight from the forward.
        weight, g = lax.optimization_barrier((weight, g))
        return *jax.linear_transpose(lambda x: dot(x, weight), inputs)(g), None

    product = jax.custom_vjp(dot)
    product.defvjp(lambda x, weight: (dot(x, weight), weight), backward)
    return product(x, weight)
