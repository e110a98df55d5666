"""Lists the residuals that a function's forward saves for its backward."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lowmembp_jax._sizes import array_bytes
from lowmembp_jax._source_files import frames_of, users_line
from lowmembp_jax.memory.devices import says_how_to_install_cudnn
from lowmembp_jax.memory.lowering.lost_work import has_backward, without_unused
from lowmembp_jax.memory.lowering.nnx_states import of_states
from lowmembp_jax.memory.lowering.step_arguments import close_over_constants
from lowmembp_jax.memory.saved_residuals._origin import Origin, Origins
from lowmembp_jax.memory.saved_residuals._trace import trace
from lowmembp_jax.memory.saved_residuals.table import Kind, Residual, Residuals
from lowmembp_jax.memory.scopes import module_path


class NotALossError(ValueError):
    """The function computes gradients itself, as a training step does, and is not a loss."""


def residuals(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] | nnx.DiffState | None = None,
) -> Residuals:
    """Lists the arrays that the forward of `fn` saves for its backward, and their origins.

    The table has each residual of `jax.vjp(fn, *args)` once, with its bytes in XLA. These are the
    arrays that JAX asks XLA to save. XLA may save fewer if it recomputes some inside a fusion, and
    it has buffers of its own. `lm.memory.compile_for` and `lm.memory.plan` give the memory of a
    compiled step. Bytes of sharded arrays are for all devices together.

    Args:
      fn: the function that is differentiated, for instance the loss (not the training step). It may
        be any function that `jax.jit` takes. Its remat policies, scans and shardings are respected.
      *args: arguments of `fn`: pytrees of arrays or `jax.ShapeDtypeStruct`s, or NNX modules.
        Nothing is computed. Fields of an Equinox module that are not arrays are constants.
      argnums: positions of the arguments to differentiate, as for `jax.grad`. None means all.
        Only floating arrays in them are differentiated. Residuals that only the gradient of another
        argument needs are not listed, so pass frozen parameters as a separate argument. In NNX
        modules and states, `nnx.Param`s are differentiated, as `nnx.grad` does, or the variables of
        an `nnx.DiffState`, such as `nnx.DiffState(0, nnx.LoRAParam)`.

    Returns:
      A `Residuals` table, which you can `print`. It has `rows`, `total_bytes`, `by_op()` and
      `by_layer()`.

    Raises:
      TypeError: an argument is not an array; the arguments to differentiate have no floating array;
        no output is floating.
      ValueError: `argnums` are not positions of arguments; `fn` computes gradients itself, as a
        training step does.
      ImportError: `fn` uses cuDNN's attention, and cuDNN's wheel is missing.
    """
    if not callable(fn):
        raise TypeError(f"residuals: fn: expected a function, got {fn!r}")
    fn, args = close_over_constants(*of_states(fn, args, is_loss=True), only_fields=True)
    plain = functools.cache(lambda: jax.make_jaxpr(fn)(*args).jaxpr)
    try:
        with says_how_to_install_cudnn():
            traced = trace(fn, args, argnums)
    except (NotImplementedError, TypeError):
        # A training step may have no second derivative or return no arrays: name the real problem.
        with contextlib.suppress(TypeError):
            _refuse_step(fn, plain())
        raise
    _refuse_step(fn, plain())
    origins = Origins(traced.jaxpr)
    outputs = {origins.of(var).key for var in traced.jaxpr.outvars}
    found: dict[tuple, tuple[Any, Origin, bool]] = {}
    for index, var in traced.kept.items():
        origin = origins.of(var)
        aval, _, was_read = found.get(origin.key, (var.aval, origin, False))
        found[origin.key] = aval, origin, was_read or index in traced.read
    rows = (
        _row(aval, origin, is_read, key in outputs, traced.arguments)
        for key, (aval, origin, is_read) in found.items()
    )
    return Residuals(tuple(sorted(rows, key=lambda row: (row.kind != "kept", -row.bytes))))


def _refuse_step(fn: Callable[..., Any], jaxpr: Any) -> None:
    # A loss may use gradients, as in a gradient penalty. Then it is a number that depends on them.
    is_number = not any(var.aval.shape for var in jaxpr.outvars)
    if has_backward(jaxpr) and not (is_number and has_backward(without_unused(jaxpr))):
        raise NotALossError(
            f"residuals: fn: {getattr(fn, '__name__', 'fn')} computes gradients itself, as a "
            "training step does: give the loss that it differentiates, with the loss's arguments"
        )


def _row(
    aval: Any, origin: Origin, is_read: bool, is_output: bool, arguments: tuple[str, ...]
) -> Residual:
    stack = len(origin.times) if aval.shape[: len(origin.times)] == origin.times else 0
    stacks = [str(equation.source_info.name_stack) for equation in origin.equations]
    return Residual(
        kind=_kind(aval, origin, is_read),
        bytes=array_bytes(aval.shape, aval.dtype),
        shape=tuple(aval.shape[stack:]),
        times=math.prod(aval.shape[:stack]),
        dtype=str(aval.dtype),
        op=_op(origin, arguments),
        module=module_path("/".join(("", *stacks, ""))),
        source=users_line(f for eqn in reversed(origin.equations) for f in frames_of(eqn)),
        is_output=is_output,
    )


def _kind(aval: Any, origin: Origin, is_read: bool) -> Kind:
    if not origin.equations and not origin.times:
        return "constant" if origin.input is None else "argument"
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return "host"
    return "kept" if is_read else "unused"


def _op(origin: Origin, arguments: tuple[str, ...]) -> str:
    if not origin.equations:
        return origin.name if origin.input is None else arguments[origin.input]
    return origin.name or origin.equations[-1].primitive.name


def saved_bytes(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] | nnx.DiffState | None = None,
) -> int:
    """Bytes that the forward of `fn` saves for its backward, in addition to its arguments.

    This is `total_bytes` of `lm.memory.residuals`, which takes the same arguments and raises the
    same errors. Arguments of `fn`, arrays it closes over, literals and reshapes of these are not
    counted. Casts of them are counted.

    Returns:
      The number of bytes.
    """
    return residuals(fn, *args, argnums=argnums).total_bytes
