"""Traces a function's forward and backward, and marks the residuals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

from lowmembp_jax.memory.classification.arguments import argument_names, is_variable

# An identity that marks each residual between forward and backward. It is only traced, never run.
_kept_p = Primitive("lowmembp_kept")
_kept_p.def_abstract_eval(lambda aval, *, index: aval)


@dataclass(frozen=True)
class Trace:
    """Forward and backward in one jaxpr.

    Attributes:
      jaxpr: its inputs are the leaves of the arguments, its outputs are the function's outputs.
      kept: the forward's variable (or literal) of each residual that autodiff asks for.
      read: the variable in `live` of each residual that the gradients depend on.
      live: `jaxpr` without equations that neither outputs nor gradients depend on.
      arguments: a name for each input, such as `params['kernel']`.
    """

    jaxpr: Any
    kept: dict[int, Any]
    read: dict[int, Any]
    live: Any
    arguments: tuple[str, ...]


def _leaves(names: list[str], args: tuple) -> list[tuple[str, Any, Any]]:
    """Name, value and dtype of each array in the arguments."""
    leaves = []
    for name, arg in zip(names, args, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            label = name + jax.tree_util.keystr(path)
            try:
                dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype
                jax.numpy.shape(leaf)
            except TypeError as error:
                raise TypeError(
                    f"residuals: {label} must be an array or a jax.ShapeDtypeStruct, "
                    f"got {type(leaf).__name__}"
                ) from error
            leaves.append((label, leaf, dtype))
    return leaves


def _chosen(argnums: int | tuple[int, ...] | None, args: tuple) -> tuple[int, ...]:
    if argnums is None:
        return tuple(range(len(args)))
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not isinstance(number, int) or not -len(args) <= number < len(args):
            raise ValueError(
                f"residuals: argnums: expected positions of the {len(args)} arguments, "
                f"got {argnums!r}"
            )
    return tuple(sorted({number % len(args) for number in numbers}))


def _trained(arg: Any, variables: Any) -> list[bool]:
    """Whether each array of an argument is outside NNX variables, or in a trained one."""
    is_trained = nnx.filterlib.to_predicate(variables)
    trained = []
    paths = jax.tree_util.tree_leaves_with_path(arg, is_leaf=is_variable)
    for path, node in paths:
        keys = tuple(getattr(entry, "key", getattr(entry, "idx", entry)) for entry in path)
        keep = not is_variable(node) or is_trained(keys, node)
        trained += [keep] * len(jax.tree.leaves(node))
    return trained


def _inexact(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _cotangent(out):
    # Cotangents of integer outputs have no bytes.
    return jnp.ones_like(out) if _inexact(out.dtype) else np.zeros(out.shape, jax.dtypes.float0)


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
    leaves = _leaves(names, args)
    flat, treedef = jax.tree.flatten(args)
    ours = set()
    start = 0
    for number, arg in enumerate(args):
        count = len(jax.tree.leaves(arg))
        if number in chosen:
            trained = enumerate(_trained(arg, variables), start)
            ours |= {i for i, is_trained in trained if is_trained and _inexact(leaves[i][2])}
        start += count
    if not ours:
        have = ", ".join(f"{name}: {dtype}" for name, _, dtype in leaves[:8]) or "no arrays"
        among = ", ".join(names[i] for i in chosen) or "the arguments"
        raise TypeError(
            f"residuals: nothing to differentiate in {among}: "
            f"at least one array there must be floating, got {have}"
        )
    positions = sorted(ours)

    def forward_and_backward(*inputs):
        def chosen_only(*values):
            every = list(inputs)
            for position, value in zip(positions, values, strict=True):
                every[position] = value
            return fn(*jax.tree.unflatten(treedef, every))

        out, vjp = jax.vjp(chosen_only, *(inputs[i] for i in positions))
        outputs = jax.tree.leaves(out)
        if not any(_inexact(o.dtype) for o in outputs):
            got = ", ".join(str(jax.typeof(o)) for o in outputs) or "no arrays"
            raise TypeError(f"residuals: fn must return at least one floating array, got {got}")
        kept, tree = jax.tree.flatten(vjp)
        kept = [
            x if jnp.result_type(x) == jax.dtypes.float0 else _kept_p.bind(x, index=i)
            for i, x in enumerate(kept)
        ]
        gradients = jax.tree.unflatten(tree, kept)(jax.tree.map(_cotangent, out))
        return outputs, gradients

    closed, shapes = jax.make_jaxpr(forward_and_backward, return_shape=True)(*flat)
    jaxpr = closed.jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    outputs = len(shapes[0])
    return Trace(
        jaxpr=jaxpr.replace(outvars=jaxpr.outvars[:outputs]),
        kept={e.params["index"]: e.invars[0] for e in jaxpr.eqns if e.primitive is _kept_p},
        read={e.params["index"]: e.outvars[0] for e in live.eqns if e.primitive is _kept_p},
        live=live,
        arguments=tuple(name for name, _, _ in leaves),
    )
