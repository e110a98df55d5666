"""Losses of a linear layer's logits over the tokens and words of one device, tile by tile.

A tile has the logits of some tokens for some words. The losses and the statistics of the softmax
need tiles with all words of the device. The backward has the statistics, and can cut the words too,
so that the float32 sum of the kernel's gradient is as small as a tile. Devices that share the
vocabulary exchange only numbers per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype
from lowmembp_jax._jax_internals import varying
from lowmembp_jax.operators._logit_words import Arrays, Spec, Words


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

    def of_words(words: Words, dh: Any):
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
    words = Words(spec, over, whole, first, length)
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


def _over_parts(words: Words, cut: _Sizes, of_words: Callable, dh: Any, zeros: Callable):
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
