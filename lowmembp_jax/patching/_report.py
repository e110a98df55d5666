"""What `lm.patch` met: what was swapped, what was not and why, and the bytes that it makes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowmembp_jax.memory.sizes import format_bytes
from lowmembp_jax.patching._settings import ACTIVATIONS


class PatchMemory(NamedTuple):
    """Bytes that the swapped operators keep from forward to backward, each call counted once.

    Attributes:
      before: what JAX's own keep. That is what they take where layers are scanned.
      recomputed: of that, what is left where XLA computes the rest again from the operator's input,
        as it does where layers are not scanned. A saving against `before` overstates there.
      after: what they keep now. The output of a norm is among it, which the Dense behind keeps
        anyway where it has the dtype of that Dense.
      outputs: the outputs of the swapped activations, which are in none of the others. A product,
        a convolution and a Dense that trains save their input. Before, XLA could recompute it from
        the activation's input; now it is saved besides `after`. A frozen Dense saves nothing.
    """

    before: int
    recomputed: int
    after: int
    outputs: int

    def __str__(self) -> str:
        before, recomputed, after, outputs = map(format_bytes, self)
        text = (
            f"kept by what was swapped: {after}; before: {before} in scanned layers, and no less "
            f"than {recomputed} where XLA computes elementwise results again, in layers that are "
            f"not scanned"
        )
        if not self.outputs:
            return text
        return (
            f"{text}. In those layers, up to {outputs} of activations' outputs are saved besides, "
            "where a product, a convolution or a trained Dense reads them. lm.memory.plan tells "
            "what the compiled step saves"
        )


class _Call(NamedTuple):
    op: str
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    args: tuple[Any, ...]  # abstract; the last is the operator's input


@dataclass
class PatchReport:
    """What one `with lm.patch() as report:` met, by operator and place.

    A place is the path of a linen module, "encoder/layer_0/mlp", or of an NNX module by attributes,
    "blocks/0/norm". It is "" outside modules, and in the model itself, which is printed as its
    class. Only what is traced is met: a call that `jax.jit` serves from its cache adds nothing.

    Attributes:
      swapped: "gelu", "silu", "layer_norm", "rms_norm" or "compress" -> the places, each once, in
        order.
      skipped: the same, or the name of an activation -> {place: why the original ran}.
      model: the class of the model that has calls of its own.
    """

    swapped: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    model: str = field(default="", compare=False)
    _calls: list[_Call] = field(default_factory=list, repr=False, compare=False)

    def add(self, op: str, place: str, reason: str | None, *call: Any) -> None:
        """A call that was met.

        Args:
          op: see `PatchReport`.
          place: see `PatchReport`.
          reason: why the original runs, None for a call that is swapped.
          *call: the plain function and ours, and their arguments.
        """
        if reason is not None:
            self.skipped.setdefault(op, {}).setdefault(place, reason)
        elif place not in self.swapped.setdefault(op, []):
            self.swapped[op].append(place)
        if call:
            plain, ours, *args = call
            args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(args))
            self._calls.append(_Call(op, plain, ours, args))

    def memory(self) -> PatchMemory:
        """The bytes kept for the backward, before and after. Call it outside the patch."""
        total = PatchMemory(0, 0, 0, 0)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for op, plain, ours, args in self._calls:
                x = _bytes(args[-1])  # an activation's output is like its input
                call = _kept(plain, args), x, _kept(ours, args), x if op in ACTIVATIONS else 0
                total = PatchMemory(*map(sum, zip(total, call, strict=True)))
        return total

    def __str__(self) -> str:
        root = self.model or "(no module)"
        lines = ["swapped:" if self.swapped else "swapped: nothing"]
        for op, places in self.swapped.items():
            names = ", ".join(place or root for place in places)
            lines.append(f"  {op} in {len(places)} places: {names}")
        lines += ["not swapped:"] if self.skipped else []
        for op, reasons in self.skipped.items():
            lines += [f"  {op} in {at or root}: {why}" for at, why in reasons.items()]
        return "\n".join(lines)


def nothing_compressed(patterns: Sequence[str], called: Sequence[str]) -> str:
    """Why nothing was compressed, and what could be: the modules that are there several times."""
    kinds = Counter(re.sub(r"\d+", "*", place) for place in called)
    repeated = sorted((kind for kind, count in kinds.items() if count > 1), key=len)
    examples = ", ".join(map(repr, (repeated or [*kinds])[:3]))
    return (
        f"patch: compress={', '.join(patterns)!r} matches none of the {len(called)} linen "
        f"modules that were called, such as {examples}"
    )


def _bytes(array: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(array.dtype, jnp.integer) else None
    bits = info(array.dtype).bits if info else 8 * array.dtype.itemsize
    return math.ceil(math.prod(array.shape) * bits / 8)


def _kept(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Bytes of the residuals of a function of its last argument and of parameters."""
    residuals = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    return sum(map(_bytes, jax.tree.leaves(residuals)))
