"""The primitive `compress`: a jaxpr that is marked when JAX differentiates it.

Like the primitive of `jax.checkpoint`, it is batched before it is differentiated. Its
differentiation rule knows which inputs vary.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend import core
from jax.extend.core.primitives import remat_p
from jax.interpreters import ad, batching, mlir, partial_eval

from lowmembp_jax._jax_internals import (
    add_checkify_rule,
    batched_jaxpr,
    fancy_transposes,
    has_effects,
    is_reference,
    weakref_lru_cache,
)
from lowmembp_jax.compression._marks import Marker
from lowmembp_jax.compression._store import only_stored
from lowmembp_jax.compression.facts import Fact
from lowmembp_jax.compression.jaxprs import every_equation, variables, without_consts


@dataclass(eq=False)
class How:
    """How to compress a jaxpr.

    Attributes:
      marker: inserts `store` into the jaxpr's derivative.
      is_param: which inputs are parameters.
      prevent_cse: as in `jax.checkpoint`.
      others: a `How` for jaxprs with other inputs, by their `is_param`.
    """

    marker: Marker
    is_param: tuple[bool, ...]
    prevent_cse: bool
    others: dict[tuple[bool, ...], "How"] = field(default_factory=dict)

    def bind(self, args, jaxpr):
        """Runs the jaxpr and returns its results."""
        if any(is_reference(v) for e in every_equation(jaxpr) for v in (*e.invars, *e.outvars)):
            # Functions with mutable arrays stay exact: JAX does not say what these arrays hold in
            # the backward.
            return self.checkpoint(args, jaxpr, self.marker.policy)
        return compress_p.bind(*args, jaxpr=jaxpr, how=self)

    def of(self, is_param):
        """Returns the `How` for a jaxpr with other inputs."""
        is_param = tuple(is_param)
        if is_param not in self.others:
            self.others[is_param] = How(self.marker, is_param, self.prevent_cse)
        return self.others[is_param]

    def checkpoint(self, args, jaxpr, policy):
        # Under `jax_remat3`, `jax.checkpoint` uses another table of rules, so this binds `remat_p`.
        return remat_p.bind(*args, jaxpr=jaxpr, **self.checkpoint_params(policy))

    def checkpoint_params(self, policy):
        return dict(prevent_cse=self.prevent_cse, differentiated=False, policy=policy)


compress_p = core.Primitive("compress")
compress_p.multiple_results = True
# JAX 0.12 would demand a rule for this primitive if an equation inside has such a rule. That
# equation is lowered when it runs, so no rule is needed.
setattr(compress_p, "is_high", lambda *_, **__: False)  # noqa: B010


@compress_p.def_impl
def _run(*args, jaxpr, how):
    return eval_jaxpr(jaxpr, (), *args)


@compress_p.def_effectful_abstract_eval
def _results(*args, jaxpr, how):
    return [var.aval for var in jaxpr.outvars], jaxpr.effects


mlir.register_lowering(compress_p, mlir.lower_fun(_run, multiple_results=True))


def _batch(axis_data, args, dims, *, jaxpr, how):
    closed, is_batched = batched_jaxpr(jaxpr, axis_data, dims)
    own = how.of((*[True] * len(closed.consts), *how.is_param))
    results = compress_p.bind(*closed.consts, *args, jaxpr=without_consts(closed.jaxpr), how=own)
    return results, [0 if one else None for one in is_batched]


batching.fancy_primitive_batchers[compress_p] = _batch


def _check(errors, args, closed, *, how):
    count = len(closed.consts) + len(errors)
    own = how.of((*[True] * count, *how.is_param))
    return compress_p.bind(
        *closed.consts, *errors, *args, jaxpr=without_consts(closed.jaxpr), how=own
    )


add_checkify_rule(compress_p, _check)


def _transpose(cotangents, *args, jaxpr, how):
    """Transposes as `jax.checkpoint` does: a linear argument is not saved, so it is not rounded."""
    params = how.checkpoint_params(how.marker.policy)
    return fancy_transposes[remat_p](cotangents, *args, jaxpr=jaxpr, **params)


fancy_transposes[compress_p] = _transpose


def _without_unused(used_outputs, *others):
    eqn = others[-1]  # JAX 0.12 passes the live inputs before it
    if not any(used_outputs) and not has_effects(eqn):
        return [False] * len(eqn.invars), None
    part, used = partial_eval.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
    how = eqn.params["how"]
    new = eqn.replace(
        invars=[*itertools.compress(eqn.invars, used)],
        outvars=[*itertools.compress(eqn.outvars, used_outputs)],
        params={"jaxpr": part, "how": how.of(itertools.compress(how.is_param, used))},
        effects=part.effects,
    )
    return used, new


partial_eval.dce_rules[compress_p] = _without_unused


def _partial_eval(trace, *tracers, jaxpr, how):
    """Runs the part that depends only on known inputs, as `jax.checkpoint` does."""
    unknown = {v for v, t in zip(jaxpr.invars, tracers, strict=True) if not t.is_known()}
    for eqn in jaxpr.eqns:
        if not unknown.isdisjoint(variables(eqn)):
            unknown.update(eqn.outvars)
    is_known = [isinstance(a, core.Literal) or a not in unknown for a in jaxpr.outvars]
    part, used = partial_eval.dce_jaxpr(jaxpr, is_known)
    inputs = [t.pval.get_known() for t in itertools.compress(tracers, used)]
    own = how.of(itertools.compress(how.is_param, used))
    found = compress_p.bind(*inputs, jaxpr=part, how=own)
    if all(is_known):
        return found
    known = iter(found)
    rest = trace.default_process_primitive(compress_p, tracers, {"jaxpr": jaxpr, "how": how})
    return [next(known) if one else result for one, result in zip(is_known, rest, strict=True)]


partial_eval.custom_partial_eval_rules[compress_p] = _partial_eval


@weakref_lru_cache
def _derivatives(jaxpr) -> dict[Any, Any]:
    """The derivatives of a jaxpr, by `How`, differentiated inputs and types."""
    return {}


def _jvp(primals, tangents, *, jaxpr, how):
    varied = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    given = list(primals), [tangents[i] for i in varied]
    leaves = jax.tree.leaves(given)
    known, key = _derivatives(jaxpr), (how, varied, tuple(map(jax.typeof, leaves)))
    if key not in known:
        known[key] = _differentiated(*given, varied, jaxpr, how)
    body, consts, is_real = known[key]
    count = len(jaxpr.outvars)
    results = how.checkpoint([*consts, *leaves], body, only_stored)
    y, dy = results[:count], iter(results[count:])
    return y, [
        next(dy) if real else ad.Zero(jax.typeof(a).to_tangent_aval())
        for real, a in zip(is_real, y, strict=True)
    ]


ad.primitive_jvps[compress_p] = _jvp


def _differentiated(primals, tangents, varied, jaxpr, how):
    """Returns the marked jaxpr of `jax.jvp`, its constants, and which results have a tangent."""
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))

    def pushed(primals, tangents):
        def of_varied(*given):
            filled = dict(enumerate(primals)) | dict(zip(varied, given, strict=True))
            return list(run(*filled.values()))

        y, dy = jax.jvp(of_varied, [primals[i] for i in varied], tangents)
        return y, [None if d.dtype == jax.dtypes.float0 else d for d in dy]

    closed, (y, dy) = jax.make_jaxpr(pushed, return_shape=True)(primals, tangents)
    body, is_real = without_consts(closed.jaxpr), [d is not None for d in dy]
    rounds = any(name is not None for name in how.marker.formats.values())
    given = [Fact()] * len(closed.consts)
    given += [
        Fact(activation=rounds and not is_one, varied=i in varied, at_hand=True)
        for i, is_one in enumerate(how.is_param)
    ]
    given += [Fact(linear=True)] * len(tangents)
    wanted = [False] * len(y) + [True] * sum(is_real)
    return how.marker.mark(body, given, wanted), closed.consts, is_real
