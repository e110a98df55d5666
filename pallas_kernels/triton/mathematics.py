"""The mathematics of the kernels, without layout: activations, codes, slopes, norms of rows.

All functions compute in float32. Blocks of a norm are [rows, columns], with columns padded to a
power of two. The padding is 0 in every input, and masked where it would not stay 0. An absent
scale, bias or mask is None. Source: LowMemoryBP (arXiv:2406.16282), sections 4 and 5.
"""

import triton
import triton.language as tl

# Constants stand to the right of tensors. Otherwise Triton 3.9's interpreter makes the product a
# constant.

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LOG2_E = tl.constexpr(1.4426950408889634)
# tanh-GELU is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). These are its coefficients times
# -log2(e).
_TANH_LINEAR = tl.constexpr(-2.302208198144325)
_TANH_CUBIC = tl.constexpr(-0.1029432395800235)
# The derivative of 2 sqrt(2 / pi) (x + 0.044715 x^3); exp(-x^2 / 2) / sqrt(2 pi) as a power of 2.
_TANH_SLOPE = tl.constexpr(1.5957691216057308)
_TANH_SLOPE_SQUARE = tl.constexpr(0.21406444881780076)
_HALF_LOG2_E = tl.constexpr(-0.7213475204444817)
_INVERSE_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _half_erfc(t):
    """erfc(t) / 2 for t >= 0, to 2e-8 before rounding: exp(-t^2) s P(s), s = 1 / (1 + 0.3 t).

    P is one polynomial for all t, a minimax fit of the relative error on [0, 10]; at 10 the value
    is 1e-45. With Triton's `erf`, 1 + erf(t) would lose all digits at t < -4.
    """
    root = tl.rsqrt(1.0 + 0.3 * t)
    s = root * root
    p = -0.064761337938930905
    p = p * s + 0.24278111657698685
    p = p * s - 0.25613818108734845
    p = p * s + 0.2738592020220025
    p = p * s - 0.04732493107193085
    p = p * s + 0.10746290437832627
    p = p * s + 0.07416960053742333
    p = p * s + 0.08535761388594798
    p = p * s + 0.08459400241463984
    return p * s * tl.exp2((t * t) * -_LOG2_E)


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """Computes the activation; uses the lowest number for -inf, because -inf times 0 is NaN.

    At the speed of memory, a kernel has time for 25 instructions an element. So this uses `exp2`,
    which is one instruction instead of five for `exp`, and rsqrt(d)^2 instead of a division of five
    instructions. This loses at most 3 units in the last place.
    """
    # A maximum would turn NaN into a number.
    x = tl.where(x < _LOWEST, _LOWEST, x)
    if FUNCTION == "gelu_erf":
        tail = _half_erfc(tl.abs(x) * _SQRT_HALF)
        y = x * tl.where(x < 0.0, tail, 1.0 - tail)
    else:
        if FUNCTION == "gelu_tanh":
            exponent = x * ((x * x) * _TANH_CUBIC + _TANH_LINEAR)
        else:
            tl.static_assert(FUNCTION == "silu")
            exponent = x * -_LOG2_E
        root = tl.rsqrt(1.0 + tl.exp2(exponent))
        y = (x * root) * root
    return y


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr):
    """The activation, as `activate`, and its derivative, 0 at -inf and 1 at inf.

    Each is x times a weight that goes from 0 to 1, and what that weight's derivative adds.
    """
    # Beyond 1000 every derivative is 0 or 1; up to 1000 no power of x is infinite.
    near = tl.where(x < -1000.0, -1000.0, tl.where(x > 1000.0, 1000.0, x))
    square = near * near
    if FUNCTION == "gelu_erf":
        tail = _half_erfc(tl.abs(near) * _SQRT_HALF)
        weight = tl.where(near < 0.0, tail, 1.0 - tail)
        rise = tl.exp2(square * _HALF_LOG2_E) * _INVERSE_SQRT_TWO_PI
    else:
        if FUNCTION == "gelu_tanh":
            exponent = near * (square * _TANH_CUBIC + _TANH_LINEAR)
            # The derivative of the sigmoid's argument.
            inner = square * _TANH_SLOPE_SQUARE + _TANH_SLOPE
        else:
            tl.static_assert(FUNCTION == "silu")
            exponent = near * -_LOG2_E
            inner = 1.0
        root = tl.rsqrt(1.0 + tl.exp2(exponent))
        weight = root * root
        rise = weight * (1.0 - weight) * inner
    return tl.where(x < _LOWEST, _LOWEST, x) * weight, weight + near * rise


@triton.jit
def pack(x, THRESHOLDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the codes of x[BLOCK] and packs them as int32[bytes].

    A code is the number of thresholds strictly below x, and 0 for NaN. 8 / BITS codes make a byte,
    with the first code in the lowest bits.
    """
    x = tl.reshape(x, (BLOCK * BITS // 8, 8 // BITS))
    shifts = (BITS * tl.arange(0, 8 // BITS))[None, :]
    codes = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(len(THRESHOLDS)):
        codes = tl.where(x > THRESHOLDS[k], (k + 1) << shifts, codes)
    return tl.sum(codes, axis=1)


@triton.jit
def _level(packed, shifts, LEVELS: tl.constexpr, FIRST: tl.constexpr, BIT: tl.constexpr):
    """Returns LEVELS[FIRST + c], where c is the number in the bits of a code from BIT down.

    It tests the bits in place, because unpacking would cost a shift and a mask for each code.
    """
    if BIT == 0:
        level = tl.full(packed.shape, LEVELS[FIRST], tl.float32)
    else:
        level = tl.where(
            (packed & (BIT << shifts)) != 0,
            _level(packed, shifts, LEVELS, FIRST + BIT, BIT // 2),
            _level(packed, shifts, LEVELS, FIRST, BIT // 2),
        )
    return level


@triton.jit
def slopes(packed, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Returns the level of every code, float32[bytes, 8 / BITS], from packed[bytes].

    LEVELS has 2^BITS numbers.
    """
    shifts = (BITS * tl.arange(0, 8 // BITS))[None, :]
    packed = tl.broadcast_to(packed[:, None], (packed.shape[0], 8 // BITS))
    return _level(packed, shifts, LEVELS, 0, 2 ** (BITS - 1))


@triton.jit
def row_mean(x, WIDTH: tl.constexpr):
    """Computes the mean of each row, [rows, 1]; the padding must be 0."""
    return tl.sum(x, axis=1)[:, None] / WIDTH


@triton.jit
def standardize(x, mask, WIDTH: tl.constexpr, CENTER: tl.constexpr, EPSILON: tl.constexpr):
    """Computes x - mean, 0 where masked, and 1 / std, [rows, 1]."""
    if CENTER:
        x = x - row_mean(x, WIDTH)
        if mask is not None:
            x = tl.where(mask, x, 0.0)
    return x, tl.rsqrt(row_mean(x * x, WIDTH) + EPSILON)


@triton.jit
def affine(x, rstd, scale, bias):
    """Computes the output from centered x, multiplied in the order of `nn.LayerNorm`."""
    if scale is not None:
        rstd = rstd * scale
    y = x * rstd
    if bias is not None:
        y = y + bias
    return y


@triton.jit
def recovery(scale, bias, DTYPE: tl.constexpr):
    """The factor that turns (output of `affine` - bias) into y, for an output in DTYPE.

    It is 1 / scale, and falls to 0 as the rounding error of the output grows beyond y scale.
    """
    noise = 1.1754943508222875e-38
    eps = 1.1920928955078125e-07
    if tl.bfloat16 == DTYPE:
        eps = 0.0078125
    elif tl.float16 == DTYPE:
        noise = 6.103515625e-05
        eps = 0.0009765625
    size = tl.abs(scale)
    noise = noise if bias is None else tl.abs(bias) * eps + noise
    ratio = noise / size
    # The result for a scale of 0 is not used, but the division must not fail.
    scale = tl.where(size > 0.0, scale, 1.0)
    return tl.where(ratio < 1e6, 1.0 / (scale * (ratio * ratio + 1.0)), 0.0)


@triton.jit
def recover_normalized(y, inverse, bias):
    """Recovers y from the output of `affine`; `inverse` is the result of `recovery`."""
    if bias is not None:
        y = y - bias
    if inverse is not None:
        y = y * inverse
    return y


@triton.jit
def input_gradient(y, rstd, g, WIDTH: tl.constexpr, CENTER: tl.constexpr):
    """Computes the cotangent of x, r (g - mean(g) - y mean(g y)); RMSNorm has no mean(g)."""
    inner = g - y * row_mean(g * y, WIDTH)
    if CENTER:
        inner = inner - row_mean(g, WIDTH)
    return rstd * inner
