"""The one way to walk nested jaxprs: the bodies of an equation, their inputs and outputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core

from lowmembp_jax._jax_internals import weakref_lru_cache

# The primitives that run one jaxpr on their operands. Other primitives with jaxprs, such as
# `reduce`, `while` and kernels, use them in another way and are opaque.
_CALLS = frozenset((
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr",
    "jit", "pmap", "remat2", "scan", "shard_map",
))  # fmt: skip
_T = TypeVar("_T")
_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _key(eqn: core.JaxprEqn) -> str | None:
    if eqn.primitive.name not in _CALLS:
        return None
    return next((key for key in _KEYS if is_jaxpr(eqn.params.get(key))), None)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def call_of(fun: Callable[..., Any], *avals: Any) -> core.JaxprEqn:
    """The one equation of a call of `fun`."""
    with jax.disable_jit(False):  # with which users debug
        return jax.make_jaxpr(jax.jit(fun))(*avals).jaxpr.eqns[0]


def opened(value: core.ClosedJaxpr | core.Jaxpr) -> core.Jaxpr:
    """The jaxpr without its constants."""
    return value.jaxpr if isinstance(value, core.ClosedJaxpr) else value


def bodies(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """The jaxprs that an equation runs on its `operands`: one, or the branches of a `cond`."""
    if eqn.primitive.name == "cond":
        return [opened(branch) for branch in eqn.params["branches"]]
    key = _key(eqn)
    return [] if key is None else [opened(eqn.params[key])]


def with_bodies(eqn: core.JaxprEqn, new: Sequence[core.Jaxpr]) -> core.JaxprEqn:
    """Replaces the jaxprs of an equation, in the order of `bodies`.

    A custom JVP or VJP becomes a plain call, because its rule belongs to the original function.
    """
    key = _key(eqn) or "branches"
    old = eqn.params[key] if key == "branches" else (eqn.params[key],)
    made = tuple(
        core.ClosedJaxpr(body, was.consts) if isinstance(was, core.ClosedJaxpr) else body
        for body, was in zip(new, old, strict=True)
    )
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.replace(primitive=core.primitives.closed_call_p, params={"call_jaxpr": made[0]})
    return eqn.replace(params=eqn.params | {key: made if key == "branches" else made[0]})


def operands(eqn: core.JaxprEqn) -> list[Any]:
    """The operands that the bodies read, in order: all but the index of a `cond`."""
    return list(eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars)


def carried(eqn: core.JaxprEqn, body: core.Jaxpr) -> list[int | None]:
    """For each input of a scan's body, the output that is this input in the next step, or None.

    JAX's versions name the parts of a scan differently, so this function compares ranks.
    """
    if eqn.primitive.name != "scan":
        return [None] * len(body.invars)

    def rank(atom):
        return len(getattr(atom.aval, "shape", ()))

    def whole(outer, inner):
        return [rank(a) == rank(b) for a, b in zip(outer, inner, strict=True)]

    read, given = whole(eqn.invars, body.invars), whole(eqn.outvars, body.outvars)
    first = sum(read) - sum(given)
    return [i - first if is_whole and i >= first else None for i, is_whole in enumerate(read)]


def follow(
    jaxpr: core.Jaxpr,
    given: Sequence[_T],
    through: Callable[[core.JaxprEqn, list[_T]], _T],
    union: Callable[[Iterable[_T]], _T],
) -> list[_T]:
    """Follows facts from the inputs to the results, also through bodies.

    Args:
      given: the fact of each input.
      through: the fact of an equation's results, from the facts of its operands. It is called for
        equations without bodies, such as opaque ones, and more than once in scans.
      union: the fact of a value that is one of several; of none for a constant.
    """
    of = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom):
        return union(()) if isinstance(atom, core.Literal) else of.get(atom, union(()))

    def inside(eqn, body):
        own = [read(atom) for atom in operands(eqn)]
        while True:
            results = follow(body, own, through, union)
            carry = zip(own, carried(eqn, body), strict=True)
            after = [one if i is None else union((one, results[i])) for one, i in carry]
            if after == own:
                return results
            own = after

    for eqn in jaxpr.eqns:
        if own := bodies(eqn):
            results = [union(each) for each in zip(*(inside(eqn, b) for b in own), strict=True)]
        else:
            results = [through(eqn, [read(atom) for atom in eqn.invars])] * len(eqn.outvars)
        of.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


@weakref_lru_cache
def without_consts(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Makes the constants the first inputs; returns the same object for the same jaxpr."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def every_inside(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Yields the equations of all jaxprs inside an equation, also of an opaque primitive."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield from every_equation(opened(value))


def every_equation(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr and of all jaxprs inside it, also of opaque primitives."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from every_inside(eqn)


def has_symbolic_sizes(jaxpr: core.Jaxpr) -> bool:
    """Whether an array, perhaps inside a body, has a symbolic size of `jax.export`."""
    atoms = [v for eqn in every_equation(jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    sizes = (size for v in (*jaxpr.invars, *atoms) for size in getattr(v.aval, "shape", ()))
    return not all(isinstance(size, int) for size in sizes)


def variables(eqn: core.JaxprEqn) -> list[core.Var]:
    """The variables that an equation reads, without literals."""
    return [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]


def without_calls_of(jaxpr: core.Jaxpr, is_small: Callable[[core.JaxprEqn], bool]) -> core.Jaxpr:
    """Inlines the calls of jitted functions whose equations are all small.

    Activations of `jax.nn` are jitted, for example.
    """
    new: list[core.JaxprEqn] = []
    results: dict[core.Var, Any] = {}

    def read(atom):
        return results.get(atom, atom) if isinstance(atom, core.Var) else atom

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        body = None
        if eqn.primitive.name == "jit":
            body = without_calls_of(bodies(eqn)[0], is_small)
        if body is None or body.constvars or not all(map(is_small, body.eqns)):
            new.append(eqn.replace(invars=operands))
            continue
        env = dict(zip(body.invars, operands, strict=True))
        for each in body.eqns:
            own = [core.Var(var.aval) for var in each.outvars]
            given = [env[a] if isinstance(a, core.Var) else a for a in each.invars]
            new.append(each.replace(invars=given, outvars=own))
            env |= zip(each.outvars, own, strict=True)
        for var, atom in zip(eqn.outvars, body.outvars, strict=True):
            results[var] = env[atom] if isinstance(atom, core.Var) else atom
    return jaxpr.replace(eqns=new, outvars=[read(atom) for atom in jaxpr.outvars])
