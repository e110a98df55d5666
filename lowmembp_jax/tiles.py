"""`lm.tiled`: calls a function on slices of a long axis, in the forward and in the backward."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding

from lowmembp_jax._arguments import call_custom_vjp, check_function, is_inexact
from lowmembp_jax._jax_internals import varying
from lowmembp_jax._tiling import explicit_spec
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
      sums. Random keys (`jax.random.key`) are folded with the number of the slice, so each slice
      draws its own numbers, and `fun` alone would draw others. A result that depends on no
      activation is computed once. It composes with jit, vmap, scan, `jax.checkpoint`,
      `lm.compress` and shardings of the other axes.

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


class _Inputs(NamedTuple):
    """The arrays that a function reads, in groups.

    Attributes:
      closed: for the jaxpr of each size of slices, the values that it closes over.
      whole: parameters.
      keys: random keys.
      cut: activations.
    """

    closed: tuple[list[Any], ...]
    whole: list[Any]
    keys: list[Any]
    cut: list[Any]


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Slices:
    """How a function runs on slices.

    Attributes:
      jaxprs: the function on slices of `size`, and on the shorter last slice, if there are such
        slices. Their inputs are the values that they close over, and the other three groups.
      axis, size: as in `tiled`.
      length: the positions on the axis.
    """

    jaxprs: tuple[core.Jaxpr, ...]
    axis: int
    size: int
    length: int

    def along(self, x: Any) -> int:
        return self.axis % x.ndim

    def sizes(self) -> list[tuple[int, int, int]]:
        """The first position, the number of slices and their size, for each jaxpr."""
        whole = self.length // self.size
        found = [(0, whole, self.size), (whole * self.size, 1, self.length % self.size)]
        return [one for one in found if one[1] and one[2]] or [(0, 1, 0)]

    def cut(self, arrays: Sequence[Any], start: Any, size: int) -> list[Any]:
        return [lax.dynamic_slice_in_dim(x, start, size, self.along(x)) for x in arrays]

    def put(self, buffers: Sequence[Any], slices: Sequence[Any], start: Any) -> list[Any]:
        return [
            lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, self.along(x))
            for x, part in zip(buffers, slices, strict=True)
        ]

    def over(self, step: Callable[..., Any], carry: Any) -> Any:
        """Calls `step(carry, number of the jaxpr, start, size, number of the slice)`."""
        done = 0
        for number, (first, count, size) in enumerate(self.sizes()):
            if count == 1:
                carry = step(carry, number, first, size, done)
            else:
                carry = lax.scan(
                    lambda carry, i, n=number, size=size: (step(carry, n, i * size, size, i), None),
                    carry,
                    jnp.arange(count),
                )[0]
            done += count
        return carry


def _zeros(type: Any, axis: int, length: int) -> Any:
    shape = (*type.shape[:axis], length, *type.shape[axis + 1 :])
    spec = explicit_spec(type)
    sharding = None if spec is None else NamedSharding(type.sharding.mesh, spec)
    zeros = jnp.zeros(shape, type.dtype, out_sharding=sharding)
    axes = tuple(varying(type))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _called(jaxpr: core.Jaxpr, closed: list[Any], inputs: _Inputs, cut: Any, index: Any) -> Any:
    keys = [jax.random.fold_in(key, index) for key in inputs.keys]
    return eval_jaxpr(jaxpr, (), *closed, *inputs.whole, *keys, *cut)


@jax.custom_vjp
def _by_slices(how: _Slices, inputs: _Inputs) -> list[Any]:
    def step(results, number, start, size, index):
        cut = how.cut(inputs.cut, start, size)
        own = _called(how.jaxprs[number], inputs.closed[number], inputs, cut, index)
        return how.put(results, own, start)

    types: list[Any] = [var.aval for var in how.jaxprs[0].outvars]
    return how.over(step, [_zeros(one, how.along(one), how.length) for one in types])


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Which arrays of `_Inputs` are differentiated."""

    flags: tuple[bool, ...]


def _forward(how, inputs):
    primals, tree = jax.tree.flatten(inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    values = tree.unflatten(x.value for x in primals)
    wanted = tuple(x.perturbed and is_inexact(x.value) for x in primals)
    return _by_slices(how, values), (how, values, _Wanted(wanted))


def _backward(saved, cotangents):
    how, inputs, wanted = saved
    wanted = jax.tree.unflatten(jax.tree.structure(inputs), wanted.flags)
    real = [i for i, g in enumerate(cotangents) if not isinstance(g, SymbolicZero)]
    real = [i for i in real if is_inexact(cotangents[i])]

    def chosen(group: str) -> list[Any]:
        pairs = zip(getattr(inputs, group), getattr(wanted, group), strict=True)
        return [x for x, is_wanted in pairs if is_wanted]

    def filled(group, flags, some):
        some = iter(some)
        return [next(some) if one else x for x, one in zip(group, flags, strict=True)]

    def step(carry, number, start, size, index):
        whole, closed, cut = carry
        flags = wanted.closed[number]
        own = [x for x, one in zip(inputs.closed[number], flags, strict=True) if one]

        def results(own, some, parts):
            given = inputs._replace(whole=filled(inputs.whole, wanted.whole, some))
            every = filled(how.cut(inputs.cut, start, size), wanted.cut, parts)
            made = filled(inputs.closed[number], flags, own)
            found = _called(how.jaxprs[number], made, given, every, index)
            return [found[i] for i in real]

        parts = how.cut(chosen("cut"), start, size)
        _, vjp = jax.vjp(results, own, chosen("whole"), parts)
        d_own, d_whole, d_cut = vjp(how.cut([cotangents[i] for i in real], start, size))
        closed = (*closed[:number], _sum(closed[number], d_own), *closed[number + 1 :])
        return _sum(whole, d_whole), closed, how.put(cut, d_cut, start)

    closed = tuple(
        [_wide(x) for x, one in zip(values, flags, strict=True) if one]
        for values, flags in zip(inputs.closed, wanted.closed, strict=True)
    )
    cut = [jnp.zeros_like(x) for x in chosen("cut")]
    whole, closed, cut = how.over(step, (list(map(_wide, chosen("whole"))), closed, cut))

    def spread(found, flags, like):
        found = iter(found)
        pairs = zip(like, flags, strict=True)
        return [next(found).astype(x.dtype) if one else None for x, one in pairs]

    return None, _Inputs(
        tuple(map(spread, closed, wanted.closed, inputs.closed)),
        spread(whole, wanted.whole, inputs.whole),
        [None] * len(inputs.keys),
        spread(cut, wanted.cut, inputs.cut),
    )


_by_slices.defvjp(_forward, _backward, symbolic_zeros=True)


def _wide(x: Any) -> Any:
    """Zeros to sum gradients in: at least float32."""
    return jnp.zeros_like(x, dtype=jnp.float32 if x.dtype.itemsize < 4 else x.dtype)


def _sum(totals: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    return [t + g.astype(t.dtype) for t, g in zip(totals, gradients, strict=True)]


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
    """Returns `call(args, kwargs, whole, static, keys)`, which calls `fun` on slices.

    Args:
      owner: the name in errors.
      holds_params: whether a node anywhere in the tree of arguments holds parameters.

    In the call, `whole`, `static` and `keys` are positions in `args`.
    """

    def call(args, kwargs, whole, static, keys=()):
        given = [None if i in static else arg for i, arg in enumerate(args)]
        leaves, tree = jax.tree.flatten((given, kwargs))
        is_held = [False] * len(leaves)
        if holds_params:
            nodes = jax.tree.leaves((given, kwargs), is_leaf=holds_params)
            is_held = [holds_params(node) for node in nodes for _ in jax.tree.leaves(node)]
        at = [i for i, arg in enumerate(given) for _ in jax.tree.leaves(arg)]
        at += [None] * (len(leaves) - len(at))
        kinds = [
            _kind(leaf, i in keys, i in whole or held)
            for leaf, i, held in zip(leaves, at, is_held, strict=True)
        ]
        groups = {
            kind: [jnp.asarray(x) for x, one in zip(leaves, kinds, strict=True) if one == kind]
            for kind in ("whole", "keys", "cut")
        }
        how = _Slices((), axis, size, _length(groups["cut"], axis, owner))

        def run(*groups):
            each: dict[Any, Any] = dict(
                zip(("whole", "keys", "cut"), map(iter, groups), strict=True)
            )
            pairs = zip(leaves, kinds, strict=True)
            filled = [leaf if kind is None else next(each[kind]) for leaf, kind in pairs]
            own, named = jax.tree.unflatten(tree, filled)
            return fun(*(args[i] if i in static else x for i, x in enumerate(own)), **named)

        traced = [
            _trace(run, groups["whole"], groups["keys"], how.cut(groups["cut"], start, part))
            for start, _, part in how.sizes()
        ]
        found = iter(_results(how, traced, groups, owner))
        results, others = traced[0].results, traced[0].others
        every = [others[i] if i in others else next(found) for i in range(results.num_leaves)]
        return jax.tree.unflatten(results, every)

    return call


def _kind(leaf: Any, is_key: bool, is_whole: bool) -> str | None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return None
    if is_key or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "keys"
    return "whole" if is_whole else "cut"


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


def _trace(run: Callable[..., Any], *groups: Any) -> _Traced:
    others, tree = dict[int, Any](), jax.tree.structure(None)

    def arrays(*groups):
        nonlocal tree
        results, tree = jax.tree.flatten(run(*groups))
        others.update({i: x for i, x in enumerate(results) if not hasattr(x, "dtype")})
        return [x for i, x in enumerate(results) if i not in others]

    closed = jax.make_jaxpr(arrays)(*groups)
    return _Traced(without_consts(closed.jaxpr), list(closed.consts), tree, others)


def _results(how: _Slices, traced: list[_Traced], groups: dict[str, Any], owner: str) -> list[Any]:
    first = traced[0]
    count, cuts = len(first.jaxpr.outvars), len(groups["cut"])

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
    values = *first.closed, *groups["whole"], *groups["keys"]
    unused: list[Any] = [var.aval for var in once.invars[len(values) :]]
    zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in unused]
    whole = iter(eval_jaxpr(once, (), *values, *zeros))
    jaxprs = tuple(part(one.jaxpr, is_cut) for one in traced)
    inputs = _Inputs(tuple(one.closed for one in traced), **groups)
    how = dataclasses.replace(how, jaxprs=jaxprs)
    found = iter(call_custom_vjp(owner, _by_slices, how, inputs))
    return [next(found if one else whole) for one in is_cut]
