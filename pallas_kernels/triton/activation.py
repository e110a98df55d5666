"""Step activations in one pass: y and packed 2-bit codes forward, the gradient backward.

In bfloat16 the forward moves 4.25 bytes an element (2 of x, 2 of y, 1/4 of codes) and the backward
as many; marks of NaNs add 1/64 to 1/16. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import triton
from jaxtyping import Array, Float, UInt8, UInt16

from pallas_kernels.interface import check_activation, check_float, check_group
from pallas_kernels.triton.activation_kernels import backward_launch, forward_launch
from pallas_kernels.triton.launch import batchable, call


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"], UInt16[Array, " groups"] | None]:
    """`function(x)`, with the 2-bit codes of x and marks of its NaNs, in one pass.

    As `pallas_kernels.activation.activation_forward`, arguments, results and errors. Besides:

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("x", x.dtype)
    check_group(group, x.size)
    check_activation(function, thresholds)
    shape, size = x.shape, x.size
    if size == 0:
        marks = None if group is None else jnp.zeros((0,), jnp.uint16)
        return x, jnp.zeros((0,), jnp.uint8), marks

    def run(x):
        launch = forward_launch(size, x.dtype, function, thresholds, group, cores)
        y, packed, marks = call(launch, x.reshape(size))
        return y.reshape(shape), packed, None if group is None else marks

    def fold(count, batched, x):
        if size % 4:
            return None
        y, packed, marks = activation_forward(x, function, thresholds, group, cores=cores)
        marks = None if marks is None else marks.reshape(count, size // group)
        return y, packed.reshape(count, size // 4), marks

    return batchable(run, fold)(x)


def activation_backward(
    packed: UInt8[Array, " bytes"],
    marks: UInt16[Array, " groups"] | None,
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
) -> Float[Array, "*shape"]:
    """`g` times the level of every code, NaN where the input of the forward was NaN.

    As `pallas_kernels.activation.activation_backward`, arguments, results and errors. Besides:

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("g", g.dtype)
    check_group(group, g.size)
    shape, size = g.shape, g.size
    if packed.dtype != jnp.uint8 or packed.shape != (triton.cdiv(size, 4),):
        raise ValueError(
            f"packed must be uint8 ({triton.cdiv(size, 4)},) for {size} elements, "
            f"got {packed.dtype} {packed.shape}"
        )
    if (group is None) != (marks is None) or (
        marks is not None and (marks.dtype != jnp.uint16 or marks.shape != (size // group,))
    ):
        raise ValueError(f"marks must be uint16 of one a group, group={group}, got {marks}")
    if not 2 <= len(levels) <= 4:
        raise ValueError(f"levels must be 2 to 4 numbers, got {levels}")
    if size == 0:
        return g

    def run(packed, marks, g):
        launch = backward_launch(size, g.dtype, levels, group, cores)
        (dx,) = call(launch, packed, packed if marks is None else marks, g.reshape(size))
        return dx.reshape(shape)

    def fold(count, batched, packed, marks, g):
        if size % 4 or not all(batched[:1] + batched[2:]):
            return None
        marks = None if marks is None else marks.reshape(count * size // group)
        packed = packed.reshape(count * size // 4)
        return activation_backward(packed, marks, g, levels, group, cores=cores)

    return batchable(run, fold)(packed, marks, g)
