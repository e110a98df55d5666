"""The report of `lm.patch`: what was swapped, what was left alone and why, and the memory saved."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from lowmembp_jax._sizes import array_bytes, format_bytes
from lowmembp_jax.compression._taken_over import Checkpoint, grouped
from lowmembp_jax.patching._settings import ACTIVATIONS

_NOTHING = (
    "swapped: nothing, because nothing that lm.patch swaps was traced inside. Put lm.patch around "
    "the call of the training step, not around its definition. What jax.jit has traced before is "
    "not traced again."
)


class PatchMemory(NamedTuple):
    """Bytes of residuals of the swapped operators. Each call is counted once.

    Attributes:
      before: residuals of JAX's own operators. Scanned layers save all of them.
      recomputed: the part of `before` that unrolled layers save. There XLA recomputes the rest from
        the operator's input, so compare `after` with this number.
      after: residuals of the swapped operators. This includes a norm's output, which the next Dense
        saves anyway if it has the same dtype.
      outputs: outputs of the swapped activations, which no other number includes. A product, a
        convolution and a trained Dense save their input. Before the swap, XLA could recompute that
        input from the activation's input. Now it is saved in addition to `after`. A frozen Dense
        saves nothing.
    """

    before: int
    recomputed: int
    after: int
    outputs: int

    def __str__(self) -> str:
        before, recomputed, after, outputs = map(format_bytes, self)
        text = (
            f"residuals of the swapped operators: {after}; before: {before} in scanned layers, at "
            f"least {recomputed} in unrolled layers, where XLA recomputes elementwise results"
        )
        if not self.outputs:
            return text
        return (
            f"{text}. Unrolled layers now also save up to {outputs} of activations' outputs, if a "
            "product, a convolution or a trained Dense reads them. lm.memory.plan gives the memory "
            "of the compiled step"
        )


class _Call(NamedTuple):
    op: str
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    args: tuple[Any, ...]  # abstract; the last is the operator's input


@dataclass
class PatchReport:
    """Lists the calls that one `with lm.patch() as report:` saw, by operator and place.

    A place is the path of a linen module, "encoder/layer_0/mlp", or the attribute path of an NNX
    module, "blocks/0/norm". It is "" outside modules, and in the model itself, which is printed as
    its class. The report has only traced calls: a call that `jax.jit` finds in its cache adds
    nothing.

    Attributes:
      swapped: "gelu", "silu", "layer_norm", "rms_norm" or "compress" -> the places, each once, in
        order.
      skipped: one of these names, or an activation's -> {place: why the original ran}.
      model: the class of the model, if it calls operators itself.
      differentiated: with `checkpoint=True`, the checkpoints of each function that was
        differentiated.
    """

    swapped: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    model: str = field(default="", compare=False)
    differentiated: list[tuple[Checkpoint, ...]] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list, repr=False, compare=False)

    def add(self, op: str, place: str, reason: str | None, *call: Any) -> None:
        """Adds a call.

        Args:
          op: see `PatchReport`.
          place: see `PatchReport`.
          reason: why the original runs; None for a call that is swapped.
          *call: the plain function, ours, and their arguments.
        """
        if reason is not None:
            self.skipped.setdefault(op, {}).setdefault(place, reason)
        elif place not in self.swapped.setdefault(op, []):
            self.swapped[op].append(place)
        if call:
            plain, ours, *args = call
            args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(args))
            self._calls.append(_Call(op, plain, ours, args))

    def add_function(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Adds the checkpoints of a differentiated function, which may be differentiated again."""
        if checkpoints not in self.differentiated:
            self.differentiated.append(checkpoints)

    def memory(self) -> PatchMemory:
        """Counts the bytes of residuals before and after. Call it outside the patch."""
        total = PatchMemory(0, 0, 0, 0)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for op, plain, ours, args in self._calls:
                x = array_bytes(args[-1].shape, args[-1].dtype)  # the output is as large
                call = _kept(plain, args), x, _kept(ours, args), x if op in ACTIVATIONS else 0
                total = PatchMemory(*map(sum, zip(total, call, strict=True)))
        return total

    def __str__(self) -> str:
        root = self.model or "(no module)"
        if not (self.swapped or self.skipped or self.differentiated):
            return _NOTHING
        lines = ["swapped:" if self.swapped else "swapped: nothing"]
        for op, places in self.swapped.items():
            names = ", ".join(place or root for place in places)
            plural = "s" * (len(places) != 1)
            lines.append(f"  {op} in {len(places)} place{plural}: {names}")
        lines += ["not swapped:"] if self.skipped else []
        for op, reasons in self.skipped.items():
            lines += [f"  {op} in {at or root}: {why}" for at, why in reasons.items()]
        if checkpoints := self.of_checkpoints():
            lines = [line for line in lines if line != "swapped: nothing"]
            lines += ["checkpoints:", *(f"  {line}" for line in checkpoints)]
        return "\n".join(lines)

    def of_checkpoints(self) -> list[str]:
        """A line of text for each kind of checkpoint, with the bytes that it saves."""
        none = ["no jax.checkpoint in the functions that are differentiated: wrap each block"]
        found = grouped(itertools.chain(*self.differentiated))
        return found or (none if self.differentiated else [])


def _kept(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Bytes of a function's residuals, if it is differentiated in all of `args`."""
    residuals = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    return sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(residuals))
