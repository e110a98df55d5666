"""A function whose backward reads what its forward stored in a narrower dtype."""

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.checkpointing import NORM_AFFINE_OUTPUT
from lowmembp_jax.choices import CHOSEN_FROM, for_rounded, with_unrounded
from lowmembp_jax.jax_internals import varying
from lowmembp_jax.kept_sums import with_kept_sums
from lowmembp_jax.provenance import Fact, facts_of
from lowmembp_jax.recomputation import with_copies
from lowmembp_jax.storage import SMALL, decode, encode, storage_dtype


@jax.tree_util.register_static
class _Recipe(NamedTuple):
    """How the backward gets the residuals back from what is stored."""

    vjp: Hashable  # the tree of the function of the cotangents, whose leaves the residuals are
    places: tuple[int, ...]  # for each leaf, which of the stored arrays it is
    dtypes: tuple[tuple[Any, Any], ...]  # of each array: stored (None as it is), computed
    varied: tuple[int, ...]  # which arguments are differentiated


def with_stored_residuals(
    jaxpr: core.Jaxpr,
    policy: Callable[..., Any] | None,
    dtypes: Mapping[Any, Any],
    is_param: Sequence[bool],
    name: str,
) -> Callable[..., list[Any]]:
    """`jaxpr` as a function of its constants and arguments, differentiated as `compress` says.

    Args:
      jaxpr: of the function.
      policy: of `jax.checkpoint`, or None.
      dtypes: what to store in, by `checkpoint_name`; None is the key for all other arrays.
      is_param: which of the constants and arguments are parameters.
      name: of the function, for errors.
    """
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    closed = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=arguments), ())
    policy = policy and for_rounded(policy, closed.jaxpr, is_param)

    def ways(closed):
        yield _checkpointed(core.jaxpr_as_fun(closed), policy)
        if policy and (summed := with_kept_sums(closed.jaxpr, policy)):
            function, with_sums = summed
            yield _checkpointed(functools.partial(function, *closed.consts), with_sums)

    def forward(*primals):
        values = [primal.value for primal in primals]
        varied = tuple(i for i, primal in enumerate(primals) if primal.perturbed)
        named = with_unrounded(closed, policy, values, is_param, varied)
        # Where something else needs the terms, a sum would be kept beside them.
        traced = (_traced(way, values, varied) for way in ways(named))
        whole, count, tree = min(traced, key=_kept_size)
        inputs = [
            Fact(var, i in varied, not is_param[i]) for i, var in enumerate(whole.jaxpr.invars)
        ]
        facts = facts_of(whole.jaxpr, inputs)[count:]
        results = eval_jaxpr(whole.jaxpr, whole.consts, *values)
        y, residuals = results[:count], results[count:]
        # Once, however many equations of the backward read it.
        keys = [fact.source for fact in facts]
        unique = {fact.source: (fact, array) for fact, array in zip(facts, residuals, strict=True)}
        places = {key: place for place, key in enumerate(unique)}
        given = {*whole.jaxpr.constvars, *whole.jaxpr.invars}
        dtypes_of = _storage_dtypes(list(unique.values()), dtypes, given)
        operator = f"lm.compress({name})"
        if unseen := dtypes.keys() - {fact.name for fact in facts} - {None}:
            warnings.warn(
                f"{operator}: nothing is kept by the name {', '.join(map(repr, sorted(unseen)))} "
                f"that dtype has: let policy save it, and give it to the array that is read",
                stacklevel=2,
            )
        recipe = _Recipe(tree, tuple(places[key] for key in keys), dtypes_of, varied)
        arrays = (array for _, array in unique.values())
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

    call = jax.custom_vjp(next(ways(closed)))
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


def _checkpointed(function: Callable, policy: Callable[..., Any] | None) -> Callable:
    if policy is None:
        return function
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def _storage_dtypes(
    kept: Sequence[tuple[Fact, Any]], dtypes: Mapping[Any, Any], given: Set[Any]
) -> tuple[tuple[jnp.dtype | None, jnp.dtype], ...]:
    """Of each array that the backward needs: its dtype in storage, None as it is, and its own."""
    # Divided by a small scale, the error of 8 bits would be large.
    names = {NORM_AFFINE_OUTPUT: None, CHOSEN_FROM: None} | dict(dtypes)
    chosen = []
    for fact, array in kept:
        is_kept = fact.statistic or not (fact.varied and fact.activation)
        if array.dtype == bool:  # exact in any case, and here for as long as the caller has it
            is_kept = fact.source in given
        dtype = None if is_kept else storage_dtype(array, names.get(fact.name, names.get(None)))
        chosen.append((array.size, dtype, array.dtype))
    most = max((size for size, dtype, _ in chosen if dtype is not None), default=0)
    return tuple((dtype if size * SMALL > most else None, own) for size, dtype, own in chosen)


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
