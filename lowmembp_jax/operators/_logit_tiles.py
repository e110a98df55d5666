"""Losses of a linear layer's logits over the tokens and words of one device, tile by tile.

A tile has the logits of some tokens for some words. The losses and the statistics of the softmax
need tiles with all words of the device. The backward has the statistics, and can cut the words too,
so that the float32 sum of the kernel's gradient is as small as a tile. Devices that share the
vocabulary exchange only numbers per token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype
from lowmembp_jax._jax_internals import varying

Kind = Literal["cross_entropy", "kl", "reverse_kl", "jensen_shannon"]


class Arrays(NamedTuple):
    """The arrays of a loss; those that a loss has not are None."""

    hidden: Any
    kernel: Any
    labels: Any  # int32 `[*tokens]`, negative at ignored tokens
    weights: Any = None
    bias: Any = None
    reference_hidden: Any = None
    reference_kernel: Any = None
    reference_bias: Any = None


@dataclass(frozen=True)
class Spec:
    """The static arguments of a loss.

    Attributes:
      name: the name of the public function.
      kind: the loss.
      tables: whether the kernel, and the reference's kernel, are [vocab, features].
      summed: the value is the weighted sum of the losses instead of the loss of each token.
      results: the numbers per token that the caller gets beside the value, and may differentiate.
      over: axes of the mesh that split the vocabulary, inside `shard_map`.
      wanted: whether hidden, kernel, bias and weights need a gradient.
    """

    name: str
    kind: Kind
    tables: tuple[bool, bool]
    summed: bool
    results: tuple[str, ...]
    tile_bytes: int
    over: tuple[str, ...] = ()
    soft_cap: float | None = None
    temperature: float = 1.0
    z_loss: float = 0.0
    smoothing: float = 0.0
    wanted: tuple[bool, ...] = (False,) * 4

    @property
    def statistics(self) -> tuple[str, ...]:
        """The numbers per token that the backward needs."""
        if self.kind == "cross_entropy":
            return ("most", "rest", *["entropy"] * ("entropy" in self.results))
        return ("most", "rest", "reference_most", "reference_rest", "mean")

    @property
    def found(self) -> tuple[str, ...]:
        """The numbers per token that a forward computes: the loss, the results, the statistics."""
        return tuple(dict.fromkeys(("loss", *self.results, *self.statistics)))


def _times(p: Array, x: Array) -> Array:
    """p x, and 0 for words without probability, whose logarithm is -infinity."""
    return jnp.where(p == 0, 0, p * x)


@dataclass(frozen=True)
class _Words:
    """Some words of one device's part of the vocabulary.

    Attributes:
      over: the axes of the mesh that split the vocabulary.
      arrays: kernels and biases of these words.
      first: the number of the first word.
      all: the number of words on all devices.
      counted: which of these words count, or None for all. Padding of the last shards does not, nor
        do words that another part has.
    """

    spec: Spec
    over: tuple[str, ...]
    arrays: Arrays
    first: Any
    all: int
    counted: Array | None = None

    @property
    def count(self) -> int:
        return self.arrays.kernel.shape[0 if self.spec.tables[0] else 1]

    def product(self, x: Array, axis: int, kernel: Array, table: bool) -> Array:
        """Multiplies x with a kernel over the kernel's features (axis 0) or words (axis 1)."""
        numbers = (((1,), (axis ^ table,)), ((), ()))
        return lax.dot_general(x, kernel, numbers, preferred_element_type=compute_dtype(x.dtype))

    def logits(self, x: Array, kernel: Array, bias: Array | None, table: bool) -> Array:
        """The logits after the soft cap, divided by the temperature."""
        z = self.product(x, 0, kernel, table)
        z = z if bias is None else z + bias[None]
        cap, temperature = self.spec.soft_cap, self.spec.temperature
        z = z if cap is None else cap * jnp.tanh(z / cap)
        return z if temperature == 1 else z / temperature

    def across(self, reduce: Any, x: Array) -> Array:
        return reduce(x, self.over) if self.over else x

    def real(self, x: Array, other: float) -> Array:
        """Replaces the numbers of words that do not count."""
        return x if self.counted is None else jnp.where(self.counted[None], x, other)

    def sum(self, x: Array) -> Array:
        return self.across(lax.psum, jnp.sum(self.real(x, 0), axis=1))

    def softmax(self, z: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the largest logit of each row, and `most`, `rest` and `z - most`.

        The logsumexp is `most + rest`. `most` is the largest logit, or 0 if it is not finite.
        """
        largest = self.across(lax.pmax, jnp.max(self.real(z, -jnp.inf), axis=1))
        is_finite = jnp.isfinite(largest)
        most = jnp.where(is_finite, largest, 0)
        u = z - most[:, None]
        # Without the terms of the maximum, which are 1, a sum near 0 stays exact.
        is_largest = z == largest[:, None]
        others = self.sum(jnp.where(is_largest, 0, jnp.exp(u)))
        ties = self.sum(is_largest.astype(z.dtype))
        rest = jnp.where(is_finite, jnp.log1p(others + (ties - 1)), largest)
        return largest, most, rest, u

    def cross_entropy(self, z: Array, labels: Array) -> dict[str, Array]:
        """Returns `Spec.found` of each row of logits, and all that it may have beside."""
        spec = self.spec
        largest, most, rest, u = self.softmax(z)
        place = labels - self.first
        right = jnp.take_along_axis(u, jnp.clip(place, 0, self.count - 1)[:, None], axis=1)[:, 0]
        right = jnp.where((place >= 0) & (place < self.count), right, 0)
        loss = rest - (1 - spec.smoothing) * self.across(lax.psum, right)
        found = {"most": most, "rest": rest, "logsumexp": most + rest}
        if spec.smoothing:
            loss -= spec.smoothing * self.sum(u) / self.all
        if spec.z_loss:
            loss += spec.z_loss * jnp.square(found["logsumexp"])
        found["loss"] = jnp.where(labels < self.all, loss, jnp.nan)
        if "correct" in spec.results:
            word = lax.broadcasted_iota(jnp.int32, z.shape, 1) + self.first
            guess = jnp.min(jnp.where(z == largest[:, None], word, self.all), axis=1)
            found["correct"] = self.across(lax.pmin, guess) == labels
        if "entropy" in spec.results:
            p = jnp.exp(u - rest[:, None])
            found["entropy"] = rest - self.sum(_times(p, u))
        return found

    def divergence(self, z: Array, r: Array) -> dict[str, Array]:
        """As `cross_entropy`; r are the reference's logits."""
        _, most, rest, u = self.softmax(z)
        _, reference_most, reference_rest, v = self.softmax(r)
        p, q = jnp.exp(u - rest[:, None]), jnp.exp(v - reference_rest[:, None])
        ratio = (u - v) - (rest - reference_rest)[
            :, None
        ]  # log p/q; rounds less than log p - log q
        mean = self.sum(_times(p, self.slope(ratio)))
        loss = mean
        if self.spec.kind == "kl":
            loss = self.sum(_times(q, -ratio))
        if self.spec.kind == "jensen_shannon":
            loss += self.sum(_times(q, self.slope(-ratio)))
        names = ("loss", *self.spec.statistics)
        values = (loss, most, rest, reference_most, reference_rest, mean)
        return dict(zip(names, values, strict=True))

    def slope(self, ratio: Array) -> Array:
        """The derivative of the divergence with respect to p, up to a constant, from log p/q."""
        if self.spec.kind == "jensen_shannon":
            return (math.log(2) - jax.nn.softplus(-ratio)) / 2
        return ratio

    def slopes(self, z: Array, r: Any, labels: Array, of: Mapping[str, Any], ct: Mapping) -> Array:
        """The gradient of the sum of the cotangents times the results, for the product x K.

        `of` has the statistics and `ct` the cotangents of some results, by name.
        """
        spec, c = self.spec, ct["loss"]
        u = z - of["most"][:, None]
        log_p = u - of["rest"][:, None]
        p = jnp.exp(log_p)
        if spec.kind == "cross_entropy":
            a = c = jnp.where(labels < self.all, c, jnp.nan)
            if spec.z_loss:
                a = c * (1 + 2 * spec.z_loss * (of["most"] + of["rest"]))
            a = a + ct["logsumexp"] if "logsumexp" in ct else a
            word = lax.broadcasted_iota(jnp.int32, z.shape, 1) + self.first
            wanted = jnp.where(word == labels[:, None], 1 - spec.smoothing, 0.0).astype(z.dtype)
            wanted = wanted + spec.smoothing / self.all if spec.smoothing else wanted
            g = p * a[:, None] - wanted * c[:, None]
            if "entropy" in ct:
                g -= _times(p, log_p + of["entropy"][:, None]) * ct["entropy"][:, None]
        else:
            v = r - of["reference_most"][:, None]
            if spec.kind == "kl":
                g = p - jnp.exp(v - of["reference_rest"][:, None])
            else:
                ratio = (u - v) - (of["rest"] - of["reference_rest"])[:, None]
                g = _times(p, self.slope(ratio) - of["mean"][:, None])
            g = g * c[:, None]
        cap, temperature = spec.soft_cap, spec.temperature
        g = g if cap is None else g * (1 - jnp.square(z * temperature / cap))
        return g if temperature == 1 else g / temperature


@dataclass(frozen=True)
class _Sizes:
    """How the work is cut: `parts` of `words`, `steps` of `tiles` of `rows` tokens."""

    parts: int
    words: int
    steps: Any
    tiles: int
    rows: Any


def _sizes(spec: Spec, size: Any, features: int, words: int, dtype: Any, cuts_words: bool) -> Any:
    wide, models = compute_dtype(dtype).itemsize, 1 if spec.kind == "cross_entropy" else 2
    tile_bytes, parts = spec.tile_bytes, 1
    # Cutting words, hidden's gradient is a sum in float32; cutting tokens alone, the kernel's is.
    if cuts_words and isinstance(size, int) and size <= words:
        # The sum for the kernel takes a quarter of a tile, and logits a half.
        most = max(128, tile_bytes // (4 * wide * max(1, features)) // 128 * 128)
        if words > most:
            parts, words, tile_bytes = -(-words // most), most, tile_bytes // 2
    # Two tiles of float32 logits make one tile of 16-bit slopes. So the kernel's gradient is read
    # and written half as often.
    tiles = max(1, wide // dtype.itemsize) if spec.wanted[1] and parts == 1 else 1
    most = max(1, tile_bytes // (wide * models * max(1, words)))
    if most >= 128:  # GPUs cut products into tiles of this size
        most -= most % 128
    steps = -(-size // (most * tiles))
    if not isinstance(size, int):  # the number of tokens is symbolic
        return _Sizes(parts, words, steps, tiles, most)
    steps = max(1, steps)
    rows = -(-size // (steps * tiles))
    if most >= 128 and steps > 1:
        rows += -rows % 16
    return _Sizes(parts, words, steps, tiles, rows)


def run_tiles(
    spec: Spec, given: tuple[tuple[str, ...], ...], *arrays: Array, over: tuple, length: int
):
    """Computes losses and gradients for the tokens and words of one device.

    Tokens with a negative label, and words from `length` on, affect nothing.

    Args:
      over, length: see `Partitioned`; `length` is the number of words on all devices.
      given: the names of `arrays`: of some fields of `Arrays`, of some results whose cotangents
        they are, and of the statistics. Without statistics this is a forward, in which the
        cotangent of each loss is its weight.

    Returns:
      For a forward, the sum of the weights times the losses, and `Spec.found` of each token. Then
      the wanted gradients: the bias' in float32, the others' in their dtype. The kernel's is in
      float32 for float16, whose range would be too small.
    """
    rest = iter(arrays)
    of_fields, ct, known = ({name: next(rest) for name in names} for names in given)
    whole = Arrays(**({"hidden": None, "kernel": None, "labels": None} | of_fields))
    h, kernel, table = whole.hidden, whole.kernel, spec.tables[0]
    shape, features, wide = h.shape[:-1], h.shape[-1], compute_dtype(h.dtype)
    size, count, is_forward = math.prod(shape), kernel.shape[0 if table else 1], not known
    cuts_words = not is_forward and spec.wanted[1]
    cut = _sizes(spec, size, features, count, h.dtype, cuts_words)
    rows, tiles, stride = cut.rows, cut.tiles, cut.rows * cut.tiles
    first = lax.axis_index(over) * count if over else 0
    if is_forward:
        ct = {"loss": jnp.ones(shape, wide) if whole.weights is None else whole.weights}

    def flat(x: Any, fill: int = 0) -> Any:
        x = x.reshape(size, *x.shape[len(shape) :])
        extra = cut.steps * stride - size
        return jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    hs = [flat(x) for x in (h, whole.reference_hidden) if x is not None]
    labels = flat(whole.labels, -1)
    ct, known = ({name: flat(x) for name, x in one.items()} for one in (ct, known))
    # Without a scale, float16 would flush small probabilities to zero.
    scale = 2.0**12 if h.dtype == jnp.float16 else 1
    along = tuple(varying(*arrays))

    def zeros(shape, dtype):
        x = jnp.zeros(shape, dtype)
        return lax.pcast(x, along, to="varying") if along else x

    def rows_of(x: Any, start: Any, count: int) -> Any:
        return lax.dynamic_slice_in_dim(x, start, count)

    def slices(start: Any, count: int) -> list[Any]:
        """Slices of the hidden arrays; ignored tokens are 0."""
        valid = rows_of(labels, start, count)[:, None] >= 0
        return [jnp.where(valid, rows_of(x, start, count), 0) for x in hs]

    def of_words(words: _Words, dh: Any):
        """Runs all tokens over some words."""

        def tile(g: Any, start: Any, offset: Any) -> tuple[Any, Any]:
            start = start + offset
            own, r, part = rows_of(labels, start, rows), None, words.arrays
            valid, xs = own >= 0, slices(start, rows)
            z = words.logits(xs[0], part.kernel, part.bias, table)
            if xs[1:]:
                others = part.reference_kernel, part.reference_bias
                r = words.logits(xs[1], *others, spec.tables[1])
            found = {name: rows_of(x, start, rows) for name, x in known.items()}
            if is_forward:
                found = words.cross_entropy(z, own) if r is None else words.divergence(z, r)
            if g is not None:
                cts = {name: rows_of(x, start, rows).astype(wide) for name, x in ct.items()}
                slopes = words.slopes(z, r, own, found, cts)
                slopes = words.real(jnp.where(valid[:, None], slopes, 0), 0)
                slopes = (slopes * scale).astype(h.dtype)
                g = slopes if tiles == 1 else lax.dynamic_update_slice_in_dim(g, slopes, offset, 0)
            if not is_forward:
                return g, ()
            numbers = (found[name] for name in spec.found)
            return g, [jnp.where(valid, x, jnp.zeros_like(x)) for x in numbers]

        def step(carry: list[Any], start: Array):
            dh, dk, db, g = carry
            if tiles == 1:
                g, found = tile(g, start, 0)
            else:  # without a loop XLA would compute the logits of all tiles first
                offsets = jnp.arange(tiles, dtype=jnp.int32) * rows
                g, found = lax.scan(lambda g, offset: tile(g, start, offset), g, offsets)
            if dh is not None:
                new = words.product(g, 1, words.arrays.kernel, table) / scale
                new = new if cut.parts == 1 else rows_of(dh, start, stride) + new
                dh = lax.dynamic_update_slice_in_dim(dh, new.astype(dh.dtype), start, 0)
            if dk is not None:
                x = slices(start, stride)[0]
                pair = (g, x) if table else (x, g)
                dk += lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=wide)
            if db is not None:
                db += jnp.sum(g.astype(wide), axis=0)
            return [dh, dk, db, g], found

        kernel, bias = words.arrays.kernel, words.arrays.bias
        dk, db = (
            zeros(x.shape, wide) if one and x is not None else None
            for one, x in zip(spec.wanted[1:3], (kernel, bias), strict=True)
        )
        g = zeros((stride, cut.words), h.dtype) if any(spec.wanted[:3]) else None
        starts = jnp.arange(cut.steps, dtype=jnp.int32) * stride
        (dh, dk, db, _), found = lax.scan(step, [dh, dk, db, g], starts)
        return dh, [x if x is None else x / scale for x in (dk, db)], found

    # float32, and the range of float16 is too small
    dtype = h.dtype if cut.parts == 1 else wide
    dh = zeros((cut.steps * stride, features), dtype) if spec.wanted[0] else None
    words = _Words(spec, over, whole, first, length)
    if count * math.prod(lax.axis_size(axis) for axis in over) != length:
        words = replace(words, counted=first + jnp.arange(count) < length)
    if cut.parts == 1:
        dh, (dk, db), found = of_words(words, dh)
        others = [dk.astype(h.dtype) if h.dtype == jnp.bfloat16 and dk is not None else dk, db]
    else:
        dh, others = _over_parts(words, cut, of_words, dh, zeros)
        found = ()
    dh = None if dh is None else dh[:size].astype(h.dtype).reshape(*shape, features)
    gradients = [x for x in (dh, *others) if x is not None]
    if not is_forward:
        return tuple(gradients)
    found = dict(zip(spec.found, (x.reshape(-1)[:size].reshape(shape) for x in found), strict=True))
    loss, weights = found["loss"], whole.weights
    total = loss if weights is None else jnp.where(whole.labels < 0, 0, loss * weights)
    return (jnp.sum(total), *found.values(), *gradients)


def _over_parts(words: _Words, cut: _Sizes, of_words: Callable, dh: Any, zeros: Callable):
    """Runs `of_words` for each part of the words. The last part overlaps the one before it."""
    spec, whole, width = words.spec, words.arrays, cut.words
    axes = [0 if table else 1 for table in spec.tables]
    fields = {"kernel": axes[0], "bias": 0, "reference_kernel": axes[1], "reference_bias": 0}
    count, wide = whole.kernel.shape[axes[0]], compute_dtype(whole.hidden.dtype)

    def step(carry: list[Any], begin: Array):
        dh, dk, db = carry
        start = jnp.minimum(begin, count - width)
        parts = {
            name: lax.dynamic_slice_in_dim(x, start, width, axis)
            for name, axis in fields.items()
            if (x := getattr(whole, name)) is not None
        }
        fresh = start + jnp.arange(width) >= begin
        counted = (
            fresh
            if words.counted is None
            else fresh & lax.dynamic_slice_in_dim(words.counted, start, width)
        )
        own = replace(words, arrays=whole._replace(**parts), first=words.first + start)
        dh, (new_dk, new_db), _ = of_words(replace(own, counted=counted), dh)
        # XLA would move the rounding, and keep the whole sum in float32.
        new_dk = lax.optimization_barrier(new_dk.astype(dk.dtype))

        def put(old: Any, new: Any, axis: int) -> Any:
            if old is None:
                return None
            is_fresh = jnp.expand_dims(fresh, 1 - axis) if old.ndim == 2 else fresh
            new = jnp.where(is_fresh, new, lax.dynamic_slice_in_dim(old, start, width, axis))
            return lax.dynamic_update_slice_in_dim(old, new, start, axis)

        return [dh, put(dk, new_dk, axes[0]), put(db, new_db, 0)], None

    # The range of float16 is too small for gradients that are scaled later.
    dtype = wide if whole.hidden.dtype == jnp.float16 else whole.hidden.dtype
    dk = zeros(whole.kernel.shape, dtype)
    db = zeros(whole.bias.shape, wide) if whole.bias is not None and spec.wanted[2] else None
    begins = jnp.arange(cut.parts, dtype=jnp.int32) * width
    (dh, dk, db), _ = lax.scan(step, [dh, dk, db], begins)
    return dh, [dk, db]
