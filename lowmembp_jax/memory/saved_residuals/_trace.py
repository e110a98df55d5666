"""Traces a function's forward and backward, and marks the residuals."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive

from lowmembp_jax._arguments import as_items, is_inexact
from lowmembp_jax._errors import GivenTypeError
from lowmembp_jax.memory.lowering.arguments import is_variable
from lowmembp_jax.memory.lowering.lost_work import without_unused
from lowmembp_jax.memory.lowering.step_arguments import argument_names, is_array

# An identity that marks each residual between forward and backward. It is only traced, never run.
_kept_p = Primitive("lowmembp_kept")
_kept_p.def_abstract_eval(lambda aval, *, index: aval)


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
