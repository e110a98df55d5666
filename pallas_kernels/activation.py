"""Step activations in one pass: y and packed codes forward, the gradient backward.

In bfloat16 with 2-bit codes, the forward moves 4.25 bytes an element (x 2, y 2, codes 1/4), and so
does the backward. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels import step_table
from pallas_kernels.flat_tiling import flat_tiling, load, pad, padded
from pallas_kernels.interface import check_activation, check_codes, check_float
from pallas_kernels.launch import launch

FORWARD_NAME = "lowmembp_activation_forward"
BACKWARD_NAME = "lowmembp_activation_backward"


def _forward_kernel(x_ref, y_ref, packed_ref, *, tiling, function, thresholds):
    mask = tiling.mask(1)
    x = load(x_ref, mask).astype(jnp.float32)
    y = step_table.activate(function, x)
    plgpu.store(y_ref, y.astype(y_ref.dtype), mask=mask)
    codes = step_table.encode(x, thresholds)
    if mask is not None:  # the last word's unused bits are 0
        codes = jnp.where(mask, codes, 0)
    packed = step_table.pack(codes, tiling.per_word, tiling.bits)
    plgpu.store(packed_ref, packed.astype(packed_ref.dtype), mask=tiling.mask(tiling.per_word))


def _backward_kernel(packed_ref, g_ref, dx_ref, *, tiling, levels):
    mask = tiling.mask(1)
    words = load(packed_ref, tiling.mask(tiling.per_word)).astype(jnp.int32)
    slope = step_table.slopes(step_table.unpack(words, tiling.per_word, tiling.bits), levels)
    dx = load(g_ref, mask).astype(jnp.float32) * slope
    plgpu.store(dx_ref, dx.astype(dx_ref.dtype), mask=mask)


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"]]:
    """Computes `function(x)` and the codes of x in one pass.

    Args:
      x: `[*shape]`, n elements, float32, bfloat16 or float16.
      function: "gelu_tanh", "gelu_erf" or "silu", computed in float32 as in `jax.nn`. At -inf the
        value is -0, as at the lowest finite number.
      thresholds: 1 to 15 numbers, ascending. The code of an element is the number of thresholds
        strictly below float32(x), and 0 for NaN. Up to 3 thresholds make 2-bit codes, more make
        4-bit codes.
      cores: multiprocessors of the target device; None for 132.
      interpret: run on the CPU, without Triton.

    Returns:
      y, `[*shape]` in x's dtype; the codes, uint8 `[ceil(n / 4)]` or `[ceil(n / 2)]`. The first
      code of each byte is in its lowest bits, and unused bits are 0.

    Raises:
      TypeError: x has another dtype.
      ValueError: the function is unknown; there are more than 15 thresholds.
    """
    check_float("x", x.dtype)
    check_activation(function, thresholds)
    if x.size == 0:
        return x, jnp.zeros((0,), jnp.uint8)
    flat = pad(x.reshape(x.size), padded(x.size), -jnp.inf)  # code 0
    bits = step_table.code_bits(len(thresholds) + 1)
    tiling = flat_tiling(flat.size, cores, bits)
    each = (1, tiling.per_word)
    y, packed = launch(
        _forward_kernel,
        name=FORWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(1)],
        out_specs=[tiling.spec(count) for count in each],
        out_shape=[
            jax.ShapeDtypeStruct(tiling.shape(count), dtype)
            for count, dtype in zip(each, (x.dtype, tiling.words), strict=True)
        ],
        warps=tiling.warps(x.dtype),
        interpret=interpret,
        tiling=tiling,
        function=function,
        thresholds=tuple(thresholds),
    )(flat.reshape(tiling.shape(1)))
    if packed.dtype != jnp.uint8:
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    packed = packed.reshape(packed.size)[: pl.cdiv(x.size, 8 // bits)]
    return y.reshape(flat.size)[: x.size].reshape(x.shape), packed


def activation_backward(
    packed: UInt8[Array, " bytes"],
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> Float[Array, "*shape"]:
    """Multiplies `g` with the level of each code.

    Args:
      packed: the codes that `activation_forward` returned.
      g: `[*shape]`, n elements, float32, bfloat16 or float16; multiplied in float32.
      levels: the slope for each code, 2 to 16 numbers.
      cores, interpret: as for `activation_forward`.

    Returns:
      `[*shape]` in g's dtype. It is NaN wherever g is NaN, also at a level of 0.

    Raises:
      TypeError: g has another dtype.
      ValueError: `packed` has another dtype or shape; there are more than 16 levels.
    """
    check_float("g", g.dtype)
    check_codes(packed, g.size, levels)
    if g.size == 0:
        return g
    size = padded(g.size)
    tiling = flat_tiling(size, cores, step_table.code_bits(len(levels)))
    flat = pad(g.reshape(g.size), size)
    words = pl.cdiv(size, tiling.per_word)
    packed = pad(packed, words * tiling.word_bytes)
    if tiling.words != jnp.uint8:
        packed = lax.bitcast_convert_type(packed.reshape(words, 2), tiling.words)
    each = (tiling.per_word, 1)
    (dx,) = launch(
        _backward_kernel,
        name=BACKWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(count) for count in each],
        out_specs=[tiling.spec(1)],
        out_shape=[jax.ShapeDtypeStruct(tiling.shape(1), g.dtype)],
        warps=tiling.warps(g.dtype),
        interpret=interpret,
        tiling=tiling,
        levels=tuple(levels),
    )(packed.reshape(tiling.shape(tiling.per_word)), flat.reshape(tiling.shape(1)))
    return dx.reshape(size)[: g.size].reshape(g.shape)
