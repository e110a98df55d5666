"""`lm.tiled`: calls a function on slices of a long axis, in the forward and in the backward."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend import core
from jax.interpreters import partial_eval

from lowmembp_jax._arguments import call_custom_vjp, check_function
from lowmembp_jax._messages import warn
from lowmembp_jax._random_keys import draws_without, is_typed_key, key_inputs, may_be_key
from lowmembp_jax._slices import Inputs, Slices, by_slices
from lowmembp_jax.compression import in_range, positions
from lowmembp_jax.compression.jaxprs import without_consts


def tiled(
    fun: Callable[..., Any] | None = None,
    *,
    axis: int,
    size: int,
    params_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Calls `fun` on slices of its activations, one after the other, forward and backward.

        mlp = lm.tiled(mlp, axis=1, size=2048)
        y = mlp(params, x)  # [batch, tokens, features]

    `fun` must compute each position of the axis from this position alone, as an MLP, a norm or a
    projection does. A function that mixes positions, such as attention, gives other values, and
    this cannot be detected.

    The backward keeps the arguments, and computes each slice again, so only one slice's
    intermediate results are in memory at a time. The gradients of parameters add up in float32
    (float64 for float64).

    Inside `lm.compress`, arguments are stored in 8 bits. A norm in `fun` would see rounded numbers,
    so compute its statistic outside, and pass it as an activation.

    Args:
      fun: a function of parameters and activations. Without it, `tiled` is a decorator with
        arguments.
      axis: the axis of all activations and results that is cut. Negative axes count from the end of
        each array.
      size: positions in a slice. The last slice may be shorter.
      params_argnums: positions of arguments that each slice gets whole, such as parameters; `()` if
        there are none. Values that `fun` closes over are whole as well.
      static_argnums: positions of arguments that are not arrays. Leaves that are no arrays, such as
        numbers and strings, are never traced.

    Returns:
      A function of the same arguments, with the values and gradients of `fun`, up to the order of
      sums. Random keys are folded with the number of the slice, so each slice draws its own
      numbers, and `fun` alone would draw others. This holds for typed and legacy keys and arrays of
      keys, as arguments or closed over. A result that depends on no activation is computed once.
      It composes with jit, vmap, scan, `jax.checkpoint`, `lm.compress` and shardings of the other
      axes.

    Warns:
      UserWarning: all slices draw the same random numbers, from a key that is made inside `fun`, or
        that a jitted function in it closes over.

    Raises:
      TypeError: `fun` is not callable; `axis` or `size` is not an integer; there is no activation.
      ValueError: `size` is below 1; an activation or a result lacks the axis, or has another length
        there; a position is out of range.
    """
    if fun is None:
        return functools.partial(
            tiled, axis=axis, size=size, params_argnums=params_argnums,
            static_argnums=static_argnums,
        )  # fmt: skip
    check_function(fun, "tiled: fun")
    check_slices("tiled", axis, size)
    params = positions("tiled", "params_argnums", params_argnums)
    static = positions("tiled", "static_argnums", static_argnums)
    call = tiled_call(fun, axis, size, "tiled")

    @functools.wraps(fun)
    def by_slices(*args, **kwargs):
        whole = in_range("tiled", "params_argnums", params, args) if args else set()
        return call(args, kwargs, whole, in_range("tiled", "static_argnums", static, args))

    return by_slices


def check_slices(owner: str, axis: Any, size: Any) -> None:
    """Raises the errors of `tiled` for these arguments of the function `owner`."""
    for name, value in (("axis", axis), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{owner}: {name}: expected an integer, got {value!r}")
    if size < 1:
        raise ValueError(f"{owner}: size: expected a number from 1 on, got {size}")


def tiled_call(
    fun: Callable[..., Any],
    axis: int,
    size: int,
    owner: str,
    holds_params: Callable[[Any], bool] | None = None,
) -> Callable[..., Any]:
    """Returns `call(args, kwargs, whole, static)`, which calls `fun` on slices.

    Args:
      owner: the name in errors.
      holds_params: whether a node anywhere in the tree of arguments holds parameters.

    In the call, `whole` and `static` are positions in `args`.
    """

    def call(args, kwargs, whole, static):
        given = [None if i in static else arg for i, arg in enumerate(args)]
        leaves, tree = jax.tree.flatten((given, kwargs))
        is_held = [False] * len(leaves)
        if holds_params:
            nodes = jax.tree.leaves((given, kwargs), is_leaf=holds_params)
            is_held = [holds_params(node) for node in nodes for _ in jax.tree.leaves(node)]
        at = [i for i, arg in enumerate(given) for _ in jax.tree.leaves(arg)]
        at += [None] * (len(leaves) - len(at))
        is_whole = {
            number: held or i in whole or is_typed_key(leaf)
            for number, (leaf, i, held) in enumerate(zip(leaves, at, is_held, strict=True))
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        }

        def run(numbers, *arrays):
            filled = dict(enumerate(leaves)) | dict(zip(numbers, arrays, strict=True))
            own, named = jax.tree.unflatten(tree, filled.values())
            return fun(*(args[i] if i in static else x for i, x in enumerate(own)), **named)

        if any(may_be_key(leaves[i]) and not one for i, one in is_whole.items()):
            every = list(is_whole)
            once = _trace(functools.partial(run, every), *(leaves[i] for i in every))
            first = len(once.closed)
            is_whole |= {every[i - first]: True for i in key_inputs(once.jaxpr) if i >= first}
        numbers = sorted(is_whole, key=lambda i: not is_whole[i])
        arrays = [jnp.asarray(leaves[i]) for i in numbers]
        groups = arrays[: sum(is_whole.values())], arrays[sum(is_whole.values()) :]
        how = Slices((), (), axis, size, _length(groups[1], axis, owner))
        traced = [
            _trace(functools.partial(run, numbers), *groups[0], *how.cut(groups[1], start, part))
            for start, _, part in how.sizes()
        ]
        found = iter(_results(how, traced, *groups, owner))
        results, others = traced[0].results, traced[0].others
        every = [others[i] if i in others else next(found) for i in range(results.num_leaves)]
        return jax.tree.unflatten(results, every)

    return call


def _length(arrays: Sequence[jax.Array], axis: int, owner: str) -> int:
    if not arrays:
        raise TypeError(f"{owner}: expected an activation, got parameters only: see params_argnums")
    shapes = ", ".join(str(x.shape) for x in arrays)
    if any(not -x.ndim <= axis < x.ndim for x in arrays):
        raise ValueError(
            f"{owner}: axis: expected activations with an axis {axis}, got {shapes}; name "
            f"arguments that each slice needs whole in params_argnums"
        )
    if len(lengths := {x.shape[axis] for x in arrays}) > 1:
        raise ValueError(f"{owner}: axis: expected one length of axis {axis}, got {shapes}")
    length = lengths.pop()
    if not isinstance(length, int):
        raise ValueError(
            f"{owner}: axis: expected a length that is known when the function is traced, got the "
            f"symbolic dimension {length} of jax.export"
        )
    return length


class _Traced(NamedTuple):
    """A function on slices of one size. `others` are its results that are not arrays."""

    jaxpr: core.Jaxpr
    closed: list[Any]
    results: Any
    others: dict[int, Any]


def _trace(run: Callable[..., Any], *arrays: Any) -> _Traced:
    others, tree = dict[int, Any](), jax.tree.structure(None)

    def results(*arrays):
        nonlocal tree
        results, tree = jax.tree.flatten(run(*arrays))
        others.update({i: x for i, x in enumerate(results) if not hasattr(x, "dtype")})
        return [x for i, x in enumerate(results) if i not in others]

    closed = jax.make_jaxpr(results)(*arrays)
    return _Traced(without_consts(closed.jaxpr), list(closed.consts), tree, others)


def _results(
    how: Slices, traced: list[_Traced], whole: list[Any], cut: list[Any], owner: str
) -> list[Any]:
    first = traced[0]
    count, cuts = len(first.jaxpr.outvars), len(cut)

    def part(jaxpr, wanted):
        return partial_eval.dce_jaxpr(jaxpr, wanted, instantiate=True)[0]

    is_cut = []
    for number in range(count):
        wanted = [i == number for i in range(count)]
        is_cut.append(any(partial_eval.dce_jaxpr(first.jaxpr, wanted)[1][-cuts:]))
    avals: list[list[Any]] = [[var.aval for var in one.jaxpr.outvars] for one in traced]
    shapes = [[aval.shape for aval in own] for own in avals]
    for own, (_, _, size) in zip(shapes, how.sizes(), strict=True):
        for like, shape in itertools.compress(zip(shapes[0], own, strict=True), is_cut):
            wanted = list(like)
            if has_axis := -len(like) <= how.axis < len(like):
                wanted[how.axis] = size
            if not has_axis or shape != tuple(wanted):
                raise ValueError(
                    f"{owner}: axis: expected results with the {size} positions of a slice on axis "
                    f"{how.axis}, got shape {shape}"
                    + (f", and {like} for the first slice" if own is not shapes[0] else "")
                )
    once = part(first.jaxpr, [not one for one in is_cut])
    values = *first.closed, *whole
    unused: list[Any] = [var.aval for var in once.invars[len(values) :]]
    zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in unused]
    others = iter(eval_jaxpr(once, (), *values, *zeros))
    jaxprs = tuple(part(one.jaxpr, is_cut) for one in traced)
    inputs = Inputs(tuple(one.closed for one in traced), whole, cut)
    keys = tuple(map(key_inputs, jaxprs))
    activations = range(len(values), len(values) + cuts)
    if draws_without(jaxprs[0], {*keys[0], *activations}):
        warn(
            f"{owner}: fun: all slices draw the same random numbers, from a key that is made "
            f"inside or that a jitted function closes over; pass the key as an argument"
        )
    how = dataclasses.replace(how, jaxprs=jaxprs, keys=keys)
    found = iter(call_custom_vjp(owner, by_slices, how, inputs))
    return [next(found if one else others) for one in is_cut]
