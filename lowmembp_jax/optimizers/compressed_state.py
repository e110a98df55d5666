"""Stores optimizer state in 8 bits between steps.

An array is cut into blocks along one axis. Each block has a scale, and each element an 8-bit
integer that is proportional to the fourth root of its magnitude. 8-bit optimizers (Dettmers et al.
2022, arXiv:2110.02861) and FlashOptim (arXiv:2602.23349) compand, too, because second moments in
one block differ by orders of magnitude, and an update divides by their root.

- A nonzero number is never stored as 0.
- Numbers are rounded up or down at random, so that the mean is right. In one step, a second moment
  changes by less than the distance between two codes. Rounded to nearest, it would never change.
- An array that is never negative, such as a second moment, has no sign bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from lowmembp_jax._arguments import check_transformation, compute_dtype, hashed_bits
from lowmembp_jax._contexts import is_for_tpu
from lowmembp_jax._tiling import explicit_spec, reshape, split_axis
from lowmembp_jax.optimizers._moments import signs

_BLOCK, _LANES = 256, 128
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


class CompressedState(NamedTuple):
    """The state of `compress_state`.

    Attributes:
      inner_state: the optimizer's state, with codes instead of the arrays that are stored in 8
        bits: int8, or uint8 if the array is never negative.
      scales: for each array of `inner_state` the magnitude of code 1 in each block (of the largest
        code in float16, which has too few exponents), or None if the array is not rounded. Scales
        have the dtype of the array, and its shape with blocks instead of elements along one axis.
    """

    inner_state: Any
    scales: tuple[Array | None, ...]


class _Blocks(NamedTuple):
    """The blocks of an array along one axis, usually the last.

    The axis has equal parts, each with some blocks. So up to 8 devices, and usually 16, share no
    block, and the blocks are the same on every mesh.

    Attributes:
      shape: the shape of the array.
      axis: the axis.
      parts: the number of parts.
      count: the number of blocks in a part.
      size: the elements of a block; the last block of a part may have fewer.
    """

    shape: tuple[int, ...]
    axis: int
    parts: int
    count: int
    size: int

    @classmethod
    def of(cls, array: Any) -> "_Blocks":
        # Only along the last axis, XLA fuses an update and its codes into one kernel. And a row
        # without gradients must not share a scale with others.
        shape, axis = array.shape, array.ndim - 1
        if shape[axis] < 32:
            axis = shape.index(max(shape))
        size, smallest = shape[axis], {16: 64, 8: 32, 4: 32, 2: 32}  # elements of a part
        whole = (n for n in (16, 8) if size % (n * _LANES) == 0)
        others = (n for n in smallest if size % n == 0 and size // n >= smallest[n])
        parts = next(whole, None) or next(others, 1)
        if explicit_spec(array):
            shards = size // array.sharding.shard_shape(shape)[axis]
            parts = parts if parts % shards == 0 else shards
        part = size // parts
        least = -(-part // _BLOCK)
        # Blocks of one size are read without padding.
        whole = (n for n in range(max(least, 1), part // 64 + 1) if part % n == 0)
        count = next(whole, least)
        return cls(shape, axis, parts, count, -(-part // max(count, 1)))

    @property
    def _is_padded(self) -> bool:
        return self.count * self.size != self._part

    @property
    def _is_tiled(self) -> bool:
        """Whether to cut along a TPU's tiles of 8 x 128, so that it copies nothing."""
        is_last = self.axis == len(self.shape) - 1 and self.size % _LANES == 0
        rows = self.shape[self.axis - 1] if self.axis else self.shape[0] // _LANES
        return is_for_tpu() and is_last and not self._is_padded and rows % 128 == 0

    def _tiles(self, x: Array, size: int) -> Array:
        y = split_axis(x, self.axis, size)
        return split_axis(y, self.axis - 1, 8) if self.axis else y  # a vector has no rows

    @property
    def _part(self) -> int:
        return self.shape[self.axis] // self.parts

    def cut(self, x: Array) -> Array:
        """Splits the axis into an axis of blocks and an axis of their elements.

        If the last block of a part has fewer elements, nothing is split.
        """
        if self._is_padded:
            return x
        return self._tiles(x, _LANES) if self._is_tiled else split_axis(x, self.axis, self.size)

    def joined(self, y: Array, like: Array) -> Array:
        """Undoes `cut`, for the spec of `like`."""
        return reshape(y, self.shape, explicit_spec(like))

    def largest(self, y: Array, like: Array) -> Array:
        """The maximum of each block of a cut array, with blocks instead of elements on the axis."""
        if self._is_padded:
            y, axis = split_axis(y, self.axis, self._part), self.axis + 1
            widths = [(0, 0, 0)] * y.ndim
            widths[axis] = 0, self.count * self.size - self._part, 0
            y = split_axis(lax.pad(y, jnp.zeros((), y.dtype), widths), axis, self.size)
            shape = list(self.shape)
            shape[self.axis] = self.parts * self.count
            return reshape(jnp.max(y, axis + 1), tuple(shape), explicit_spec(like))
        largest = jnp.max(y, self.elements(y))
        if not self._is_tiled:
            return largest
        shape = *self.shape[:-1], self.shape[-1] // _LANES
        tiles = reshape(largest, shape, explicit_spec(like))
        return jnp.max(split_axis(tiles, self.axis, self.size // _LANES), axis=-1)

    def spread(self, scales: Array) -> Array:
        """Gives each block's scale the axes of a cut array."""
        if self._is_padded:
            y, axis = split_axis(scales, self.axis, self.count), self.axis + 1
            y = lax.slice_in_dim(jnp.repeat(y, self.size, axis), 0, self._part, axis=axis)
            return reshape(y, self.shape, explicit_spec(scales))
        if self._is_tiled:
            return self._tiles(jnp.repeat(scales, self.size // _LANES, axis=-1), 1)
        return jnp.expand_dims(scales, self.axis + 1)

    def elements(self, y: Array) -> int:
        """The axis of a cut array that has the elements of a block."""
        return self.axis + y.ndim - len(self.shape)


def _most(is_signed: bool) -> int:
    """The largest code."""
    return 127 if is_signed else 255


def _of_one(scales: Float[Array, "..."], is_signed: bool) -> Float[Array, "..."]:
    """The magnitude of code 1 in each block."""
    y = scales.astype(compute_dtype(scales.dtype))
    return y / float(_most(is_signed) ** 4) if scales.dtype == jnp.float16 else y


def _scale_bits(dtype: Any) -> int:
    return min(15, jnp.finfo(dtype).nmant)


def _scales(x: Float[Array, "*shape"], blocks: _Blocks, is_signed: bool) -> Float[Array, "..."]:
    """The scale of each block; NaN if an element is not finite."""
    y = blocks.cut(x).astype(compute_dtype(x.dtype))
    # XLA's maximum may ignore NaNs.
    largest = blocks.largest(jnp.where(jnp.isfinite(y), jnp.abs(y), jnp.inf), x)
    scales = jnp.where(jnp.isinf(largest), jnp.nan, largest)
    if x.dtype != jnp.float16:
        scales = scales / float(_most(is_signed) ** 4)
    info = jnp.finfo(y.dtype)
    scales = jnp.where(scales < info.tiny, 0, scales)
    # A decoded largest magnitude may differ in its last bits; rounding gives the same scale again.
    return lax.reduce_precision(scales, info.nexp, _scale_bits(x.dtype)).astype(x.dtype)


# XLA computes everything but the scales twice: in a kernel for the new scales and in a kernel for
# the codes. Only while this is cheap does XLA recompute instead of writing float32 arrays.
def _decode(codes: Array, scales: Float[Array, "..."]) -> Float[Array, "*shape"]:
    blocks = _Blocks.of(jax.typeof(codes))
    expected = list(codes.shape)
    expected[blocks.axis] = blocks.parts * blocks.count
    if scales.shape != tuple(expected):
        raise ValueError(
            f"compress_state: state: expected scales {tuple(expected)} for an array "
            f"{codes.shape}, got {scales.shape}: another version of lowmembp_jax has made this "
            f"state"
        )
    c = blocks.cut(codes).astype(compute_dtype(scales.dtype))
    y = c * jnp.abs(c) * jnp.square(c) * _of_one(blocks.spread(scales), codes.dtype == jnp.int8)
    return blocks.joined(y.astype(scales.dtype), like=codes)


def _encode(
    x: Float[Array, "*shape"], scales: Float[Array, "..."], blocks: _Blocks, is_signed: bool
) -> Array:
    y = blocks.cut(x).astype(compute_dtype(x.dtype))
    one, most, least = _of_one(blocks.spread(scales), is_signed), _most(is_signed), 1.0
    # Because of the two small numbers, a decoded code gets the same code again, although roots are
    # not exact.
    inverse = jnp.where(one == 0, 0, (1 - 1e-6) / jnp.where(one == 0, 1, one))
    power = jnp.abs(y) * inverse
    if jnp.finfo(x.dtype).bits == 16:
        power = _as_decoded(y, power, one, x.dtype, most)
    if x.dtype == jnp.float16:  # decodes smaller codes to 0
        least = jnp.floor(jnp.sqrt(jnp.sqrt(2.0**-25 * inverse)) + 1.001)
    low = jnp.floor(jnp.sqrt(jnp.sqrt(power)) + 1e-3)
    below, above = jnp.square(jnp.square(low)), jnp.square(jnp.square(low + 1))
    chance = hashed_bits(y, one).astype(y.dtype) * 2.0**-32
    codes = low + (power > below + chance * (above - below)).astype(y.dtype)
    codes = jnp.clip(codes, (power > 0).astype(y.dtype) * least, most)
    codes = jnp.copysign(codes, y).astype(jnp.int8) if is_signed else codes.astype(jnp.uint8)
    return blocks.joined(codes, like=x)


def _as_decoded(y: Array, power: Array, one: Array, dtype: Any, most: int) -> Array:
    """Undoes the rounding of decoded numbers to 16 bits, which can be a tenth of a code.

    Returns:
      The fourth powers, which are exact if `y` is a decoded number.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(y.dtype)
    fourth = jnp.square(jnp.square(jnp.round(jnp.sqrt(jnp.sqrt(power)))))
    # XLA may leave out a cast to 16 bits and back, but not this rounding.
    numbers = (lax.reduce_precision(each, wide.nexp, info.nmant) for each in (fourth * one, y))
    decoded, own = map(jnp.abs, numbers)
    # Subnormal numbers of float16 have fewer bits than this.
    half = 2.0**-25 if dtype == jnp.float16 else 0.0
    power = jnp.where(jnp.abs(decoded - own) <= half, fourth * (1 - 1e-6), power)
    # The largest number has the largest code, although the scale is rounded.
    top = float(most**4)
    return jnp.where(power >= top / (1 + 2.0 ** -_scale_bits(dtype)), top, power)


def _decoded(state: CompressedState) -> Any:
    leaves, tree = jax.tree.flatten(state.inner_state)
    return tree.unflatten(
        x if scales is None else _decode(x, scales)
        for x, scales in zip(leaves, state.scales, strict=True)
    )


def decompress_state(state: Any) -> Any:
    """Decodes the state of `compress_state` to the state of the plain optimizer.

    Args:
      state: the state of `compress_state`, or of a transformation around it.

    Returns:
      The state with each `CompressedState` replaced by the optimizer's own state. Each array has
      its own dtype.

    Raises:
      TypeError: `state` contains no `CompressedState`.
      ValueError: another version of this library has made the state.
    """
    found = jax.tree.leaves(state, is_leaf=_is_compressed)
    if not any(map(_is_compressed, found)):
        raise TypeError(
            f"decompress_state: state: expected the state of lm.compress_state, got "
            f"{type(state).__name__} without one"
        )
    return jax.tree.map(
        lambda x: _decoded(x) if _is_compressed(x) else x, state, is_leaf=_is_compressed
    )


def _is_compressed(node: Any) -> bool:
    return isinstance(node, CompressedState)


def compress_state(
    optimizer: optax.GradientTransformation, *, min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """Stores the state of an optimizer in 8 bits between steps.

        optimizer = lm.compress_state(optax.adamw(1e-4))

    The update is computed in the state's own dtypes. In a jitted step with a donated state, XLA
    decodes, updates and encodes each array in place. The state of AdamW then takes about 2 bytes
    per parameter instead of 8.

    An array is stored in 8 bits if it is float32, bfloat16, float16 or float64, has at least
    `min_size` elements, and its initial value does not depend on the parameters. Copies of the
    parameters (exponential averages, Lookahead, schedule-free optimizers), integers and small
    arrays are not rounded. Neither are moments whose difference is under a root or a divisor, such
    as the variance of `optax.rmsprop(centered=True)`. If a block gets a NaN or an infinity, all of
    its elements become NaN.

    The state is a `CompressedState`, whose `inner_state` has the structure of the optimizer's
    state. Wrap the optimizer itself, `optax.MultiSteps(lm.compress_state(optax.adamw(1e-4)), 4)`. A
    transformation that updates in `lax.cond` would have all decoded arrays in memory at once.

    For a large model, call `init` in `jax.jit`, so that no array exists in float32. `init(params,
    state)` encodes the state of a plain optimizer that has already trained; `lm.decompress_state`
    does the reverse. A decoded state is encoded to the same numbers again.

    Args:
      optimizer: any optax transformation.
      min_size: arrays with fewer elements are not rounded.

    Returns:
      A transformation with the updates of `optimizer`, up to the rounding of the state.

    Warns:
      UserWarning: the update of `optimizer` needs more than gradients, state and parameters, so
        that nothing is known about its state, and no array is rounded.

    Raises:
      TypeError: `optimizer` is not a transformation; `min_size` is not an integer.
      ValueError: `min_size` is negative; `state` is not the state of `optimizer`.
    """
    check_transformation(optimizer, "compress_state")
    if isinstance(min_size, bool) or not isinstance(min_size, int):
        raise TypeError(f"compress_state: min_size: expected an int, got {min_size!r}")
    if min_size < 0:
        raise ValueError(f"compress_state: min_size: expected 0 or more, got {min_size}")
    inner = optax.with_extra_args_support(optimizer)

    def is_large(leaf: Any) -> bool:
        if leaf.dtype not in _DTYPES or not leaf.ndim or leaf.size < max(min_size, 1):
            return False
        return _Blocks.of(leaf).size > 4  # otherwise the scales would outweigh the savings

    def init(params: Any, state: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(inner.init(params) if state is None else state)
        if state is not None and tree != jax.tree.structure(jax.eval_shape(inner.init, params)):
            raise ValueError(
                f"compress_state: state: expected the state of the plain optimizer, got {tree}"
            )
        codes, scales = [], []
        for leaf, is_signed in zip(leaves, signs(inner, params, is_large), strict=True):
            scale = None
            if is_signed is not None:
                blocks = _Blocks.of(jax.typeof(leaf))
                scale = _scales(leaf, blocks, is_signed)
                leaf = _encode(leaf, scale, blocks, is_signed)
            codes.append(leaf)
            scales.append(scale)
        return CompressedState(tree.unflatten(codes), tuple(scales))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if not _is_compressed(state):
            raise TypeError(
                f"compress_state: state: expected the state that init gives, got "
                f"{type(state).__name__}"
            )
        # The new scales come from a second update; XLA drops all of it but the scales. With one
        # update, XLA would write the whole state to memory before it computes the codes. The
        # maximum keeps XLA from merging both: it does not know that scales are never negative.
        again = tuple(None if scale is None else jnp.maximum(scale, 0) for scale in state.scales)
        again = _decoded(state._replace(scales=again))
        again = jax.tree.leaves(inner.update(updates, again, params, **extra)[1])
        updates, new = inner.update(updates, _decoded(state), params, **extra)
        leaves, tree = jax.tree.flatten(new)
        codes, scales = [], []
        olds = jax.tree.leaves(state.inner_state)
        for x, other, old, scale in zip(leaves, again, olds, state.scales, strict=True):
            if scale is not None:
                blocks, is_signed = _Blocks.of(jax.typeof(old)), old.dtype == jnp.int8
                scale = _scales(other, blocks, is_signed)
                x = _encode(x, scale, blocks, is_signed)
            codes.append(x)
            scales.append(scale)
        return updates, CompressedState(tree.unflatten(codes), tuple(scales))

    return optax.GradientTransformationExtraArgs(init, update)
