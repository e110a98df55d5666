"""Exact forward, residuals in 8 bits: for any function.

The forward is that of `jax.checkpoint(fun, policy=policy)`. The arrays that it keeps are stored in
a narrower dtype until the backward reads them, so gradients have their rounding error. Nothing is
computed again that the policy alone would not compute again.
"""

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.arrays import call_custom_vjp
from lowmembp_jax.checkpointing import NORM_AFFINE_OUTPUT, products_saveable
from lowmembp_jax.jax_internals import varying
from lowmembp_jax.kept_sums import with_kept_sums
from lowmembp_jax.provenance import Fact, facts_of
from lowmembp_jax.recomputation import with_copies
from lowmembp_jax.storage import check_storage, decode, encode, storage_dtype

#: An array this many times smaller than the largest one is not worth the rounding. It may be a
#: parameter that came as an activation. (`vmap` and `scan` show one array of many, so that the
#: number of elements says nothing.)
_SMALL = 64

StorageDtype = jax.typing.DTypeLike | Mapping[str | None, jax.typing.DTypeLike | None] | None


@jax.tree_util.register_static
class _Recipe(NamedTuple):
    """How the backward gets the residuals back from what is stored."""

    vjp: Hashable  # the tree of the function of the cotangents, whose leaves the residuals are
    places: tuple[int, ...]  # for each leaf, which of the stored arrays it is
    dtypes: tuple[tuple[Any, Any], ...]  # of each array: stored (None as it is), computed
    varied: tuple[int, ...]  # which arguments are differentiated


def compress(
    fun: Callable[..., Any],
    *,
    dtype: StorageDtype = jnp.float8_e4m3fn,
    policy: Callable[..., Any] | None = products_saveable,
    params_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`fun` with the same values, whose backward reads residuals stored in `dtype`.

        block = lm.compress(block)          # block(params, x)
        x = block(params, x)

    Used like `jax.checkpoint`, around each block of a model and not around the whole of it: the
    backward of a block has all of its residuals in their own dtype for as long as it runs.

    Stored in `dtype` are the floating arrays that the backward needs, each once: results that
    `policy` keeps, of a sum of two the sum, and the activations among the arguments. As they are
    stay parameters and what is computed from them alone, what depends on nothing that is
    differentiated, integers, booleans, keys, scalars, arrays 64 times smaller than the largest of
    those stored, statistics of rows such as the logsumexp of attention, the outputs of this
    library's norms that the backward divides by their scale (see `ms_layer_norm`), and what takes
    no less with its scales, such as rows of 2 numbers in int8.

    Args:
      fun: any function that JAX can differentiate. Arrays that it closes over are parameters.
      dtype: of what is stored. `float8_e4m3fn`: values beyond +-448 are clipped to it, in the
        residual only. A model with larger activations takes `float8_e5m2`, of two mantissa bits: in
        a test with a channel at 5,000 the loss is that of exact gradients, and 15% above it with
        `float8_e4m3fn`. `int8`: a scale a row of the last axis. `int4`: a scale and a least value a
        group of 32 or more, rounded at random. None: as they are. A mapping from `checkpoint_name`
        to one of these, with None as the key for all other arrays; what it does not name is stored
        as it is.
      policy: what is kept, as in `jax.checkpoint`. None: what the operators of `fun` keep by
        themselves. `jax.checkpoint_policies.nothing_saveable`: the arguments alone.
      params_argnums: positions of the arguments that are parameters, never quantised; `()` where
        the first argument is an activation, which would be kept as it is otherwise.
      static_argnums: positions of arguments that are not traced. Leaves that are no arrays, such
        as `deterministic=True`, are never traced.

    Returns:
      A function of the same arguments. Its values are those of `jax.checkpoint(fun,
      policy=policy)`; gradients are approximate. It composes with jit, vmap, scan, `jax.checkpoint`
      and shardings. Forward-mode and second-order differentiation are not defined.

    Warns:
      UserWarning: no argument is an activation, so that there is nothing to store.

    Raises:
      ValueError: `dtype` is no storage format; a position is negative.
      TypeError: `fun` or `policy` is not callable.
      NotImplementedError: a second derivative was asked for.
    """
    for key, given in dtype.items() if isinstance(dtype, Mapping) else [(None, dtype)]:
        check_storage(given, "dtype" if key is None else f"dtype[{key!r}]")
    for name, given in (("fun", fun), ("policy", policy)):
        if not callable(given) and (given is not None or name == "fun"):
            raise TypeError(f"compress: {name} must be callable, got {given!r}")
    dtypes = dtype if isinstance(dtype, Mapping) else {None: dtype}
    params = _positions("params_argnums", params_argnums)
    static = _positions("static_argnums", static_argnums)

    @functools.wraps(fun)
    def compressed(*args, **kwargs):
        split = [((), arg) if i in static else (arg, ()) for i, arg in enumerate(args)]
        traced, untraced = [a for a, _ in split], [a for _, a in split]
        paths, tree = jax.tree.flatten_with_path((traced, kwargs))
        leaves = [leaf for _, leaf in paths]
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
        # Paths begin with 0, and the position, for positional arguments.
        is_param = [paths[i][0][0].idx == 0 and paths[i][0][1].idx in params for i in arrays]

        def run(*values):
            filled = list(leaves)
            for i, value in zip(arrays, values, strict=True):
                filled[i] = value
            positional, named = jax.tree.unflatten(tree, filled)
            every = enumerate(zip(positional, untraced, strict=True))
            return fun(*(no if i in static else yes for i, (yes, no) in every), **named)

        name = getattr(fun, "__name__", type(fun).__name__)
        if arrays and all(is_param):
            warnings.warn(
                f"compress: every array that {name} is given is a parameter, and nothing is stored "
                f"in fewer bits; params_argnums=() makes the first argument an activation",
                stacklevel=2,
            )
        values = [leaves[i] for i in arrays]
        closed, shape = jax.make_jaxpr(run, return_shape=True)(*values)
        is_param = [True] * len(closed.consts) + is_param
        call = _with_stored_residuals(closed.jaxpr, policy, dtypes, is_param, name)
        results = call_custom_vjp(f"lm.compress({name})", call, *closed.consts, *values)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return compressed


def _positions(name: str, argnums: int | Sequence[int]) -> frozenset[int]:
    positions = [argnums] if isinstance(argnums, int) else argnums
    if not all(isinstance(position, int) and position >= 0 for position in positions):
        raise ValueError(f"compress: {name} must be positions from 0 on, got {argnums!r}")
    return frozenset(positions)


def _with_stored_residuals(
    jaxpr: core.Jaxpr,
    policy: Callable[..., Any] | None,
    dtypes: Mapping[Any, Any],
    is_param: Sequence[bool],
    name: str,
) -> Callable[..., list[Any]]:
    """`jaxpr` as a function of its constants and arguments, differentiated as `compress` says."""
    count = len(jaxpr.constvars)

    def plain(*values):
        return eval_jaxpr(jaxpr, values[:count], *values[count:])

    kept = plain if policy is None else _checkpointed(plain, policy)
    summed = None if policy is None else with_kept_sums(jaxpr, policy)
    ways = [kept] if summed is None else [kept, _checkpointed(*summed)]

    def forward(*primals):
        values = [primal.value for primal in primals]
        varied = tuple(i for i, primal in enumerate(primals) if primal.perturbed)
        # Where something else needs the terms, a sum would be kept beside them.
        closed, count, tree = min((_traced(way, values, varied) for way in ways), key=_kept_size)
        inputs = [
            Fact(var, i in varied, not is_param[i]) for i, var in enumerate(closed.jaxpr.invars)
        ]
        facts = facts_of(closed.jaxpr, inputs)[count:]
        results = eval_jaxpr(closed.jaxpr, closed.consts, *values)
        y, residuals = results[:count], results[count:]
        # Once, however many equations of the backward read it.
        keys = [fact.source for fact in facts]
        unique = {fact.source: (fact, array) for fact, array in zip(facts, residuals, strict=True)}
        places = {key: place for place, key in enumerate(unique)}
        dtypes_of = _storage_dtypes(list(unique.values()), dtypes)
        recipe = _Recipe(tree, tuple(places[key] for key in keys), dtypes_of, varied)
        arrays = (array for _, array in unique.values())
        operator = f"lm.compress({name})"
        stored = [encode(x, to, operator) for x, (to, _) in zip(arrays, dtypes_of, strict=True)]
        return y, (stored, recipe)

    def backward(stored, cotangents):
        arrays, recipe = stored
        known = [None if isinstance(c, SymbolicZero) else c for c in cotangents]
        # Or XLA would widen the arrays in the forward, and keep them wide.
        arrays, known = _barrier((arrays, known))
        cotangents = [
            _zeros(zero) if cotangent is None else cotangent
            for cotangent, zero in zip(known, cotangents, strict=True)
        ]

        def decoded(place, array):
            return decode(array, *recipe.dtypes[place])

        def again(place):
            return decoded(place, lax.optimization_barrier(arrays[place]))

        def run(residuals, cotangents):
            vjp = jax.tree.unflatten(recipe.vjp, [residuals[place] for place in recipe.places])
            return vjp(cotangents)

        residuals = [decoded(place, array) for place, array in enumerate(arrays)]
        narrow = [place for place, (to, _) in enumerate(recipe.dtypes) if to is not None]
        copies = {place: functools.partial(again, place) for place in narrow}
        results = with_copies(run, residuals, cotangents, copies)
        gradients = dict(zip(recipe.varied, results, strict=True))
        return tuple(gradients.get(i) for i in range(len(is_param)))

    call = jax.custom_vjp(kept)
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


class _Traced(NamedTuple):
    """A forward with its residuals."""

    closed: core.ClosedJaxpr  # gives results, then residuals
    count: int  # of results
    vjp: Hashable  # see `_Recipe`


def _traced(function: Callable, values: Sequence[Any], varied: Sequence[int]) -> _Traced:
    tree: Any = None

    def with_residuals(*values):
        nonlocal tree

        def of_varied(*given):
            filled = dict(enumerate(values)) | dict(zip(varied, given, strict=True))
            return function(*filled.values())

        y, vjp = jax.vjp(of_varied, *(values[i] for i in varied))
        residuals, tree = jax.tree.flatten(vjp)
        return y, residuals

    closed, (y, _) = jax.make_jaxpr(with_residuals, return_shape=True)(*values)
    return _Traced(closed, len(y), tree)


def _kept_size(traced: _Traced) -> int:
    residuals = traced.closed.jaxpr.outvars[traced.count :]
    return sum(map(equations.size, {var for var in residuals if isinstance(var, core.Var)}))


def _checkpointed(function: Callable, policy: Callable[..., Any]) -> Callable:
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def _storage_dtypes(
    kept: Sequence[tuple[Fact, Any]], dtypes: Mapping[Any, Any]
) -> tuple[tuple[jnp.dtype | None, jnp.dtype], ...]:
    """Of each array that the backward needs: its dtype in storage, None as it is, and its own."""
    # Divided by a small scale, the error of 8 bits would be large.
    names = {NORM_AFFINE_OUTPUT: None} | dict(dtypes)
    chosen = []
    for fact, array in kept:
        is_kept = fact.statistic or not (fact.varied and fact.activation)
        dtype = None if is_kept else storage_dtype(array, names.get(fact.name, names.get(None)))
        chosen.append((array.size, dtype, array.dtype))
    most = max((size for size, dtype, _ in chosen if dtype is not None), default=0)
    return tuple((dtype if size * _SMALL > most else None, own) for size, dtype, own in chosen)


def _barrier(tree: Any) -> Any:
    """An optimization barrier for each set of varying axes: in JAX 0.10 one makes all alike."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[frozenset[str], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(varying(leaf), []).append(i)
    behind = {}
    for group in groups.values():
        behind |= zip(group, lax.optimization_barrier([leaves[i] for i in group]), strict=True)
    return structure.unflatten(behind[i] for i in range(len(leaves)))


def _zeros(zero: SymbolicZero) -> Any:
    aval: Any = zero.aval
    is_float0 = aval.dtype == jax.dtypes.float0
    return (np if is_float0 else jnp).zeros(aval.shape, aval.dtype)
