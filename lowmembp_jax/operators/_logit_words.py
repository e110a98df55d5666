"""The logits of some words for some tokens: losses, statistics of the softmax, and slopes.

`_logit_tiles` runs these for one tile at a time. Devices that share the vocabulary exchange only
numbers per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype

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
class Words:
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
