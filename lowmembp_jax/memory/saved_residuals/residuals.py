"""Lists the residuals that a function's forward saves for its backward."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive

from lowmembp_jax._arguments import as_items, is_inexact
from lowmembp_jax._messages import GivenTypeError, frames_of, users_line
from lowmembp_jax._sizes import array_bytes
from lowmembp_jax.memory.devices import says_how_to_install_cudnn
from lowmembp_jax.memory.lowering.arguments import has_backward, is_variable, without_unused
from lowmembp_jax.memory.lowering.step_arguments import (
    argument_names,
    close_over_constants,
    is_array,
    of_states,
)
from lowmembp_jax.memory.saved_residuals._origin import Origin, Origins
from lowmembp_jax.memory.saved_residuals.table import Residual, Residuals
from lowmembp_jax.memory.scopes import module_path

# An identity that marks each residual between forward and backward. It is only traced, never run.
_kept_p = Primitive("lowmembp_kept")
_kept_p.def_abstract_eval(lambda aval, *, index: aval)


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
    kind, op = "kept" if is_read else "unused", origin.name
    if origin.equations:
        op = op or origin.equations[-1].primitive.name
    elif origin.input is not None:
        op = arguments[origin.input]
    if not origin.equations and not origin.times:
        kind = "constant" if origin.input is None else "argument"
    elif getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        kind = "host"
    stack = len(origin.times) if aval.shape[: len(origin.times)] == origin.times else 0
    stacks = [str(equation.source_info.name_stack) for equation in origin.equations]
    return Residual(
        kind=kind,
        bytes=array_bytes(aval.shape, aval.dtype),
        shape=tuple(aval.shape[stack:]),
        times=math.prod(aval.shape[:stack]),
        dtype=str(aval.dtype),
        op=op,
        module=module_path("/".join(("", *stacks, ""))),
        source=users_line(f for eqn in reversed(origin.equations) for f in frames_of(eqn)),
        is_output=is_output,
    )


def saved_bytes(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] | nnx.DiffState | None = None,
) -> int:
    """Bytes that the forward of `fn` saves for its backward, in addition to its arguments.

    This is `total_bytes` of `lm.memory.residuals`, which takes the same arguments and raises the
    same errors. Arguments of `fn`, arrays it closes over, literals and reshapes of these are not
    counted. Casts of them are counted.
    """
    return residuals(fn, *args, argnums=argnums).total_bytes


class Trace(NamedTuple):
    """The forward in a jaxpr, from the leaves of the arguments to the function's outputs."""

    jaxpr: Any
    kept: dict[int, Any]  # the variable (or literal) of each residual that autodiff asks for
    read: frozenset[int]  # the residuals that the gradients depend on
    arguments: tuple[str, ...]  # a name for each input, such as `params['kernel']`


def trace(
    fn: Callable[..., Any],
    args: tuple,
    argnums: int | tuple[int, ...] | nnx.DiffState | None,
) -> Trace:
    """Traces `fn` and its backward for all floating leaves of the arguments in `argnums`.

    Only trained NNX variables count: `nnx.Param`s, or the variables that `nnx.DiffState` selects.

    Raises:
      TypeError: an argument is not an array; no argument to differentiate or no output is floating.
      ValueError: `argnums` are not positions of `args`.
    """
    variables: Any = nnx.Param
    if isinstance(argnums, nnx.DiffState):
        argnums, variables = argnums.argnum, argnums.filter
    chosen = _chosen(argnums, args)
    names = argument_names(fn, len(args))
    leaves = {
        name + jax.tree_util.keystr(path): (leaf, number in chosen)
        for number, (name, arg) in enumerate(zip(names, args, strict=True))
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg)
    }
    dtypes = {name: _dtype(name, leaf) for name, (leaf, _) in leaves.items()}
    is_trained = [each for arg in args for each in trained(arg, variables)]
    positions = [
        position
        for position, ((name, (_, is_chosen)), is_own) in enumerate(
            zip(leaves.items(), is_trained, strict=True)
        )
        if is_chosen and is_own and is_inexact(dtypes[name])
    ]
    if not positions:
        have = ", ".join(f"{name}: {dtype}" for name, dtype in [*dtypes.items()][:8]) or "no arrays"
        among = ", ".join(names[i] for i in chosen) or "the arguments"
        raise GivenTypeError(
            f"residuals: nothing to differentiate in {among}: "
            f"at least one array there must be floating, got {have}"
        )
    flat, treedef = jax.tree.flatten(args)

    def forward_and_backward(*inputs):
        def chosen_only(*values):
            every = list(inputs)
            for position, value in zip(positions, values, strict=True):
                every[position] = value
            return fn(*jax.tree.unflatten(treedef, every))

        out, vjp = jax.vjp(chosen_only, *(inputs[i] for i in positions))
        outputs = jax.tree.leaves(out)
        if not any(map(is_inexact, outputs)):
            got = ", ".join(str(jax.typeof(o)) for o in outputs) or "no arrays"
            raise GivenTypeError(
                f"residuals: fn must return at least one floating array, got {got}"
            )
        kept, tree = jax.tree.flatten(vjp)
        kept = [
            x if jnp.result_type(x) == jax.dtypes.float0 else _kept_p.bind(x, index=i)
            for i, x in enumerate(kept)
        ]
        gradients = jax.tree.unflatten(tree, kept)(jax.tree.map(_cotangent, out))
        return outputs, gradients

    closed, shapes = jax.make_jaxpr(forward_and_backward, return_shape=True)(*flat)
    jaxpr = closed.jaxpr
    live = without_unused(jaxpr)
    return Trace(
        jaxpr=jaxpr.replace(outvars=jaxpr.outvars[: len(shapes[0])]),
        kept={e.params["index"]: e.invars[0] for e in jaxpr.eqns if e.primitive is _kept_p},
        read=frozenset(e.params["index"] for e in live.eqns if e.primitive is _kept_p),
        arguments=tuple(leaves),
    )


def _chosen(argnums: int | tuple[int, ...] | None, args: tuple) -> tuple[int, ...]:
    if argnums is None:
        return tuple(range(len(args)))
    numbers = as_items(argnums)
    for number in numbers:
        if not isinstance(number, int) or not -len(args) <= number < len(args):
            raise ValueError(
                f"residuals: argnums: expected positions of the {len(args)} arguments, "
                f"got {argnums!r}"
            )
    return tuple(sorted({number % len(args) for number in numbers}))


def _dtype(name: str, leaf: Any) -> Any:
    try:
        return leaf.dtype if is_array(leaf) else jax.typeof(leaf).dtype
    except TypeError as error:
        raise GivenTypeError(
            f"residuals: {name} must be an array or a jax.ShapeDtypeStruct, "
            f"got {type(leaf).__name__}"
        ) from error


def trained(arg: Any, variables: Any = nnx.Param) -> list[bool]:
    """Whether each array of an argument is outside NNX variables, or in a trained one."""
    is_trained = nnx.filterlib.to_predicate(variables)
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(arg, is_leaf=is_variable):
        keys = tuple(getattr(entry, "key", getattr(entry, "idx", entry)) for entry in path)
        keep = not is_variable(node) or is_trained(keys, node)
        found += [keep] * len(jax.tree.leaves(node))
    return found


def _cotangent(out: Any) -> Any:
    # Cotangents of integer outputs have no bytes.
    return jnp.ones_like(out) if is_inexact(out.dtype) else np.zeros(out.shape, jax.dtypes.float0)
