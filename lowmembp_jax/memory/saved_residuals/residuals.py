"""What a function's backward keeps."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lowmembp_jax.memory.devices import says_how_to_install_cudnn
from lowmembp_jax.memory.lowering.nnx_states import of_states
from lowmembp_jax.memory.lowering.step_arguments import close_over_constants
from lowmembp_jax.memory.notes.lost_work import has_backward, without_unused
from lowmembp_jax.memory.saved_residuals.labels import Labels
from lowmembp_jax.memory.saved_residuals.origin import Equations, Origin
from lowmembp_jax.memory.saved_residuals.table import Kind, Residual, Residuals
from lowmembp_jax.memory.saved_residuals.trace import Trace, trace
from lowmembp_jax.memory.sizes import array_bytes


class NotALossError(ValueError):
    """Where a loss is asked for, a function computes gradients itself, as a training step does."""


def _kind(aval, origin: Origin, used: bool) -> Kind:
    if not origin.equations and not origin.times:
        return "constant" if origin.input is None else "argument"
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return "host"
    return "kept" if used else "unused"


def _op(origin: Origin, label: str, arguments: tuple[str, ...]) -> str:
    if not origin.equations and origin.input is not None:
        return arguments[origin.input]
    if origin.cast:
        return "cast of an input"
    return "copy of an input" if origin.input is not None else label


def _row(
    aval, origin: Origin, used_by: tuple[str, ...], is_output: bool, traced: Trace, labels: Labels
) -> Residual:
    label = labels.label(origin.equations, origin.name)
    stack = len(origin.times) if aval.shape[: len(origin.times)] == origin.times else 0
    return Residual(
        kind=_kind(aval, origin, bool(used_by)),
        bytes=array_bytes(aval.shape, aval.dtype),
        shape=tuple(aval.shape[stack:]),
        times=math.prod(aval.shape[:stack]),
        dtype=str(aval.dtype),
        op=_op(origin, label.op, traced.arguments),
        primitive=origin.equations[-1].primitive.name if origin.equations else "",
        module=label.module,
        source=label.source,
        used_by=used_by,
        is_output=is_output,
    )


def residuals(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] | nnx.DiffState | None = None,
) -> Residuals:
    """The arrays that the forward of `fn` keeps for its backward, and where each comes from.

    Listed are the residuals of `jax.vjp(fn, *args)`, each once however often it is used, with the
    bytes it takes in XLA. This is what JAX asks to be kept: XLA may keep less where it recomputes
    something inside a fusion, and keeps buffers of its own beside it; `lm.memory.compile_for`
    and `lm.memory.plan` have what a compiled step takes. Sharded arrays count with all devices'
    parts together.

    Args:
      fn: the function that is differentiated, for instance the loss, and not the training step.
        Whatever `jax.jit` takes; remat policies, scans and shardings count.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees, and NNX modules. Nothing
        is computed. Fields of an Equinox module that are no arrays are constants.
      argnums: positions of the arguments that are differentiated, as for `jax.grad`. None: all;
        in either case the floating arrays in them. What only the gradient of another argument
        would need is not kept: give the frozen parameters as an argument of their own. Of NNX
        modules and states, `nnx.Param`s are differentiated, as by `nnx.grad`, or what an
        `nnx.DiffState` says, such as `nnx.DiffState(0, nnx.LoRAParam)`.

    Returns:
      The table; `print` it, or take its `rows`, `total_bytes`, `by_op()` and `by_layer()`.

    Raises:
      TypeError: an argument is no array; nothing to differentiate in the arguments is floating;
        no output is floating.
      ValueError: `argnums` are not positions of arguments; `fn` is a training step, which computes
        gradients itself.
      ImportError: `fn` has cuDNN's attention, and cuDNN's wheel is missing.
    """
    fn, args = close_over_constants(*of_states(fn, args, is_loss=True), only_fields=True)
    plain = functools.cache(lambda: jax.make_jaxpr(fn)(*args).jaxpr)
    try:
        with says_how_to_install_cudnn():
            traced = trace(fn, args, argnums)
    except (NotImplementedError, TypeError):
        # A step may have no second derivative, and return no arrays.
        with contextlib.suppress(TypeError):
            _refuse_step(fn, plain())
        raise
    _refuse_step(fn, plain())
    forward, backward = Equations(traced.jaxpr), Equations(traced.live)
    labels = Labels(plain)
    outputs = {forward.origin(var).key for var in traced.jaxpr.outvars}
    found: dict[tuple, tuple[Any, Origin, list[int]]] = {}
    for index, var in traced.kept.items():
        origin = forward.origin(var)
        found.setdefault(origin.key, (var.aval, origin, []))[2].append(index)
    rows = []
    for key, (aval, origin, indices) in found.items():
        readers = (
            labels.label(equations)
            for index in indices
            if index in traced.read
            for equations in backward.readers(traced.read[index])
        )
        used_by = tuple(dict.fromkeys(f"{r.module}: {r.op}" if r.module else r.op for r in readers))
        rows.append(_row(aval, origin, used_by, key in outputs, traced, labels))
    return Residuals(tuple(sorted(rows, key=lambda row: (row.kind != "kept", -row.bytes))))


def _refuse_step(fn: Callable[..., Any], jaxpr: Any) -> None:
    # A loss may hold gradients, as a penalty does, and is a number that is made of them.
    is_number = not any(var.aval.shape for var in jaxpr.outvars)
    if has_backward(jaxpr) and not (is_number and has_backward(without_unused(jaxpr))):
        raise NotALossError(
            f"residuals: {getattr(fn, '__name__', 'fn')} computes gradients itself, as a training "
            "step does, whose own backward would be that of the optimizer: give the loss that it "
            "differentiates, with the loss's arguments"
        )


def saved_bytes(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] | nnx.DiffState | None = None,
) -> int:
    """Bytes that the backward of `fn` keeps beyond what is in memory anyway.

    The total of `lm.memory.residuals`, which see for the arguments and errors. Arguments of `fn`,
    arrays it closes over and literals are not counted; casts of them are, reshapes are not.

    Returns:
      The number of bytes.
    """
    return residuals(fn, *args, argnums=argnums).total_bytes
