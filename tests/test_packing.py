"""Four codes to a byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowmembp_jax as lm

each_shape = pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7,), (4, 4), (5, 3, 11)])


def random_codes(shape):
    return np.random.default_rng(0).integers(0, 4, shape).astype(np.uint8)


@each_shape
@pytest.mark.parametrize("dtype", [jnp.uint2, jnp.uint8, jnp.int32])
def test_roundtrip(shape, dtype):
    codes = random_codes(shape)
    packed = lm.pack_2bit(jnp.asarray(codes).astype(dtype))
    assert packed.dtype == jnp.uint8 and packed.shape == (-(-codes.size // 4),)
    np.testing.assert_array_equal(lm.unpack_2bit(packed, codes.shape), codes)
    flat = lm.unpack_2bit(packed, codes.size)
    assert flat.dtype == jnp.uint8
    np.testing.assert_array_equal(flat, codes.reshape(-1))


@each_shape
def test_least_significant_bits_first(shape):
    codes = random_codes(shape).reshape(-1)
    expected = np.zeros(-(-codes.size // 4), np.uint8)
    for i, code in enumerate(codes):
        expected[i >> 2] |= code << (2 * (i & 3))
    np.testing.assert_array_equal(lm.pack_2bit(jnp.asarray(codes).reshape(shape)), expected)


def test_packed_bytes_are_the_bits_of_uint2():
    """What a kernel packs becomes the residual by a bitcast (DESIGN.md, fact 1)."""
    codes = random_codes((3, 8))
    as_uint2 = lax.bitcast_convert_type(lm.pack_2bit(jnp.asarray(codes)), jnp.uint2)
    np.testing.assert_array_equal(as_uint2.reshape(codes.shape).astype(jnp.uint8), codes)


def test_only_the_two_low_bits_count():
    np.testing.assert_array_equal(lm.pack_2bit(jnp.array([7, 4, 255, 1])), [0b01_11_00_11])


def test_under_jit_and_vmap():
    codes = jnp.asarray(random_codes((6, 9)))
    roundtrip = jax.jit(jax.vmap(lambda c: lm.unpack_2bit(lm.pack_2bit(c), 9)))
    np.testing.assert_array_equal(roundtrip(codes), codes)


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="codes: expected integers, got float32"):
        lm.pack_2bit(jnp.ones(3))
    with pytest.raises(TypeError, match="packed: expected uint8, got int32"):
        lm.unpack_2bit(jnp.ones(3, jnp.int32), 9)
    with pytest.raises(ValueError, match=r"packed: expected .*\(3,\) for size=9, got \(2,\)"):
        lm.unpack_2bit(jnp.ones(2, jnp.uint8), 9)
    with pytest.raises(ValueError, match="size=-1"):
        lm.unpack_2bit(jnp.zeros(0, jnp.uint8), -1)
