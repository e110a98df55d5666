"""Step activations in one pass: y and packed codes forward, the gradient backward.

In bfloat16 with 2-bit codes, the forward moves 4.25 bytes an element (x 2, y 2, codes 1/4), and so
does the backward. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.interface import check_activation, check_codes, check_float
from pallas_kernels.step_table import code_bits
from pallas_kernels.triton.activation_kernels import backward_launch, forward_launch
from pallas_kernels.triton.launch import batchable, call


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    *,
    cores: int | None = None,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"]]:
    """Computes `function(x)` and the codes of x in one pass.

    Arguments, results and other errors are as for `pallas_kernels.activation.activation_forward`.

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("x", x.dtype)
    check_activation(function, thresholds)
    shape, size = x.shape, x.size
    if size == 0:
        return x, jnp.zeros((0,), jnp.uint8)

    def run(x):
        launch = forward_launch(size, x.dtype, function, thresholds, cores)
        y, packed = call(launch, x.reshape(size))
        return y.reshape(shape), packed

    def fold(count, batched, x):
        each = 8 // code_bits(len(thresholds) + 1)
        if size % each:
            return None
        y, packed = activation_forward(x, function, thresholds, cores=cores)
        return y, packed.reshape(count, size // each)

    return batchable(run, fold)(x)


def activation_backward(
    packed: UInt8[Array, " bytes"],
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    *,
    cores: int | None = None,
) -> Float[Array, "*shape"]:
    """Multiplies `g` with the level of each code.

    Arguments, results and other errors are as for `pallas_kernels.activation.activation_backward`.

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("g", g.dtype)
    check_codes(packed, g.size, levels)
    shape, size = g.shape, g.size
    if size == 0:
        return g

    def run(packed, g):
        (dx,) = call(backward_launch(size, g.dtype, levels, cores), packed, g.reshape(size))
        return dx.reshape(shape)

    def fold(count, batched, packed, g):
        if size % (8 // code_bits(len(levels))) or not all(batched):
            return None
        return activation_backward(packed.reshape(packed.size), g, levels, cores=cores)

    return batchable(run, fold)(packed, g)
