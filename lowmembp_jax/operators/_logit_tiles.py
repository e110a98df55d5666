"""Cross-entropy of a linear layer over the tokens and words of one device, tile by tile.

A tile has the logits of some tokens for all words of the device. Devices that share the vocabulary
exchange only numbers per token.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype
from lowmembp_jax._jax_internals import varying


@dataclass(frozen=True)
class Spec:
    """The static arguments of a loss.

    Attributes:
      table: the kernel is [vocab, features].
      summed: the value is the weighted sum of the losses instead of the loss of each token.
      returns_lse: the caller gets the logsumexp and may differentiate it.
      over: axes of the mesh that split the vocabulary, inside `shard_map`.
      wanted: whether hidden, kernel, bias and weights need a gradient.
    """

    table: bool
    summed: bool
    returns_lse: bool
    soft_cap: float | None
    z_loss: float
    smoothing: float
    tile_bytes: int
    over: tuple[str, ...]
    wanted: tuple[bool, ...] = (False,) * 4


def _across(reduce: Any, x: Array, over: tuple[str, ...]) -> Array:
    return reduce(x, over) if over else x


@dataclass(frozen=True)
class _Words:
    """One device's part of the vocabulary."""

    spec: Spec
    over: tuple[str, ...]
    kernel: Array
    bias: Array | None

    @property
    def count(self) -> int:
        return self.kernel.shape[0 if self.spec.table else 1]

    @property
    def all(self) -> int:
        return self.count * math.prod(lax.axis_size(axis) for axis in self.over)

    @property
    def first(self) -> Array | int:
        return lax.axis_index(self.over) * self.count if self.over else 0

    def product(self, x: Array, axis: int) -> Array:
        """Multiplies x with the kernel over the kernel's features (axis 0) or words (axis 1)."""
        numbers = (((1,), (axis ^ self.spec.table,)), ((), ()))
        return lax.dot_general(
            x, self.kernel, numbers, preferred_element_type=compute_dtype(x.dtype)
        )

    def logits(self, h: Array) -> Array:
        z = self.product(h, 0)
        z = z if self.bias is None else z + self.bias[None]
        cap = self.spec.soft_cap
        return z if cap is None else cap * jnp.tanh(z / cap)

    def losses(self, z: Array, labels: Array) -> tuple[Array, Array, Array]:
        """Returns the loss, the logsumexp and the likeliest word of each row of logits."""
        spec, over = self.spec, self.over
        most = _across(lax.pmax, jnp.max(z, axis=1), over)
        shift = jnp.where(jnp.isfinite(most), most, 0)
        total = _across(lax.psum, jnp.sum(jnp.exp(z - shift[:, None]), axis=1), over)
        lse = jnp.log(total) + shift
        word = lax.broadcasted_iota(jnp.int32, z.shape, 1) + self.first
        guess = jnp.min(jnp.where(z == most[:, None], word, self.all), axis=1)
        guess = _across(lax.pmin, guess, over)
        place = labels - self.first
        right = jnp.take_along_axis(z, jnp.clip(place, 0, self.count - 1)[:, None], axis=1)[:, 0]
        right = jnp.where((place >= 0) & (place < self.count), right, 0)
        loss = lse - (1 - spec.smoothing) * _across(lax.psum, right, over)
        if spec.smoothing:
            loss -= spec.smoothing * _across(lax.psum, jnp.sum(z, axis=1) / self.all, over)
        if spec.z_loss:
            loss += spec.z_loss * jnp.square(lse)
        return jnp.where(labels < self.all, loss, jnp.nan), lse, guess

    def slopes(self, z: Array, lse: Array, labels: Array, c: Array, d: Array | None) -> Array:
        """The gradient of c times the loss plus d times the logsumexp, for the product x K."""
        spec = self.spec
        c = jnp.where(labels < self.all, c, jnp.nan)
        a = c * (1 + 2 * spec.z_loss * lse) if spec.z_loss else c
        a = a if d is None else a + d
        word = lax.broadcasted_iota(jnp.int32, z.shape, 1) + self.first
        wanted = jnp.where(word == labels[:, None], 1 - spec.smoothing, 0.0).astype(z.dtype)
        wanted = wanted + spec.smoothing / self.all if spec.smoothing else wanted
        g = jnp.exp(z - lse[:, None]) * a[:, None] - wanted * c[:, None]
        return g if spec.soft_cap is None else g * (1 - jnp.square(z / spec.soft_cap))


@jax.named_scope("linear_cross_entropy")  # the planner finds the loss by this name
def run_tiles(spec: Spec, given: tuple[bool, ...], *arrays: Array, over: tuple[str, ...]):
    """Computes loss and gradients for the tokens and words of one device.

    Args:
      given: which of hidden, kernel, labels, c, d and bias are in `arrays`; see `_Words.slopes`.

    Returns:
      The sum of c times the losses; for each token the loss, the logsumexp and whether the
      prediction is right; and the wanted gradients (kernel and bias in float32).
    """
    rest = iter(arrays)
    arguments: list[Any] = [next(rest) if there else None for there in given]
    h, kernel, labels, c, d, bias = arguments
    shape, features, wide = h.shape[:-1], h.shape[-1], compute_dtype(h.dtype)
    words, size = _Words(spec, over, kernel, bias), math.prod(shape)
    # Two tiles of float32 logits make one tile of 16-bit slopes. So the kernel's gradient is read
    # and written half as often.
    tiles = max(1, wide.itemsize // h.dtype.itemsize) if spec.wanted[1] else 1
    most = max(1, spec.tile_bytes // (wide.itemsize * max(1, words.count)))
    if most >= 128:  # GPUs cut products into tiles of this size
        most -= most % 128
    steps = -(-size // (most * tiles))
    if isinstance(size, int):
        steps = max(1, steps)
        rows = -(-size // (steps * tiles))
        if most >= 128 and steps > 1:
            rows += -rows % 16
    else:  # the number of tokens is symbolic
        rows = most
    stride = rows * tiles

    def flat(x: Any, fill: int = 0) -> Any:
        if x is None:
            return None
        x = x.reshape(size, *x.shape[len(shape) :])
        extra = steps * stride - size
        return jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    h, *rows_of = flat(h), flat(labels, -1), flat(c), flat(d)
    # Without a scale, float16 would flush small probabilities to zero.
    scale = 2.0**12 if h.dtype == jnp.float16 else 1

    def slices(start: Any, count: int) -> list[Any]:
        """Slices hidden, labels, c and d; sets hidden to 0 for ignored tokens."""
        found: list[Any] = [
            None if x is None else lax.dynamic_slice_in_dim(x, start, count) for x in (h, *rows_of)
        ]
        return [jnp.where(found[1][:, None] >= 0, found[0], 0), *found[1:]]

    def tile(g: Any, start: Any, offset: Any) -> tuple[Any, Any]:
        x, labels, c, d = slices(start + offset, rows)
        z, valid = words.logits(x), labels >= 0
        loss, lse, guess = words.losses(z, labels)
        found = [jnp.where(valid, x, 0) for x in (loss, lse)] + [valid & (guess == labels)]
        if g is not None:
            cast: Any = lambda x: None if x is None else jnp.where(valid, x.astype(wide), 0)  # noqa: E731
            slopes = (words.slopes(z, lse, labels, cast(c), cast(d)) * scale).astype(h.dtype)
            g = slopes if tiles == 1 else lax.dynamic_update_slice_in_dim(g, slopes, offset, 0)
        return g, found

    def step(carry: list[Any], start: Array):
        dh, dk, db, g = carry
        if tiles == 1:
            g, found = tile(g, start, 0)
        else:  # without a loop XLA would compute the logits of all tiles first
            offsets = jnp.arange(tiles, dtype=jnp.int32) * rows
            g, found = lax.scan(lambda g, offset: tile(g, start, offset), g, offsets)
        if dh is not None:
            new = (words.product(g, 1) / scale).astype(dh.dtype)
            dh = lax.dynamic_update_slice_in_dim(dh, new, start, 0)
        if dk is not None:
            x = slices(start, stride)[0]
            pair = (g, x) if spec.table else (x, g)
            dk += lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        if db is not None:
            db += jnp.sum(g.astype(wide), axis=0)
        return [dh, dk, db, g], found

    along = tuple(varying(*arrays))

    def zeros(shape, dtype):
        x = jnp.zeros(shape, dtype)
        return lax.pcast(x, along, to="varying") if along else x

    sums = [
        zeros(x.shape, dtype) if one and x is not None else None
        for one, x, dtype in zip(
            spec.wanted[:3], (h, kernel, bias), (h.dtype, wide, wide), strict=True
        )
    ]
    g = zeros((stride, words.count), h.dtype) if any(spec.wanted[:3]) else None
    starts = jnp.arange(steps, dtype=jnp.int32) * stride
    (dh, *others, _), found = lax.scan(step, [*sums, g], starts)
    losses, lse, right = (x.reshape(-1)[:size].reshape(shape) for x in found)
    total = jnp.sum(losses if c is None else jnp.where(labels < 0, 0, losses * c.astype(wide)))
    dh = None if dh is None else dh[:size].reshape(*shape, features)
    gradients = [dh, *(x if x is None else x / scale for x in others)]
    return (total, losses, lse, right, *(x for x in gradients if x is not None))
