"""The primitive `compress`: a jaxpr that is marked when JAX differentiates it.

Like the primitive of `jax.checkpoint`, it is batched before it is differentiated. Its
differentiation rule knows which inputs vary.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import checkpoint as jax_checkpoint  # the name `jax.checkpoint` may be replaced by ours
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
    operation,
    saved_by_checkpoint,
    weakref_lru_cache,
)
from lowmembp_jax._messages import warn
from lowmembp_jax._sizes import array_bytes, format_bytes
from lowmembp_jax.compression import jaxprs
from lowmembp_jax.compression._marks import Marker
from lowmembp_jax.compression._store import only_stored
from lowmembp_jax.compression.facts import Fact
from lowmembp_jax.compression.jaxprs import every_equation, variables, without_consts


class Input(enum.Enum):
    """What an input of a jaxpr is.

    A value that is computed from PARAMETERs alone is never rounded. A KEPT input is an activation
    that is in memory anyway, so it is not stored a second time.
    """

    PARAMETER, KEPT, ACTIVATION = range(3)


@dataclass(eq=False)
class Saved:
    """The bytes that a jaxpr saves for its backward, apart from inputs that are in memory anyway.

    Attributes:
      before: by `jax.checkpoint`, with the same policy.
      after: by `compress`.
      warns: whether to warn, once, that `compress` would save more.
    """

    before: int | None = None
    after: int | None = None
    warns: bool = False

    def warn(self, owner: str, before: int, after: int) -> None:
        if self.warns and after > before:
            self.warns = False
            warn(
                f"{owner} runs jax.checkpoint with its policy, which saves {format_bytes(before)}; "
                f"in fewer bits it would save {format_bytes(after)}"
            )


@dataclass(eq=False)
class How:
    """How to compress a jaxpr.

    Attributes:
      marker: inserts `store` into the jaxpr's derivative.
      inputs: what the inputs are.
      prevent_cse: as in `jax.checkpoint`.
      saved: if given, the bytes are counted, and a jaxpr that would not save fewer of them is
        differentiated as `jax.checkpoint` does, unless it has side effects, which that cannot do.
      like: a `How` that differs only in `saved`, and has the derivatives of both.
      others: a `How` for jaxprs with other inputs, by their `inputs`.
    """

    marker: Marker
    inputs: tuple[Input, ...]
    prevent_cse: bool
    saved: Saved | None = None
    like: "How | None" = None
    others: dict[tuple[Input, ...], "How"] = field(default_factory=dict)

    def bind(self, args, jaxpr):
        """Runs the jaxpr and returns its results."""
        atoms = [v for e in every_equation(jaxpr) for v in (*e.invars, *e.outvars)]
        if any(is_reference(atom) or not hasattr(atom.aval, "dtype") for atom in atoms):
            # Functions with mutable arrays stay exact, because JAX does not say what these hold in
            # the backward, and functions with values that are not arrays, such as tokens.
            return self.checkpoint(args, jaxpr, self.marker.policy)
        if any(operation(eqn) == "CustomRemat" for eqn in every_equation(jaxpr)):
            # JAX's custom_remat has a derivative in `jax.checkpoint` alone.
            run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
            options = {"policy": self.marker.policy, "prevent_cse": self.prevent_cse}
            return jax_checkpoint(run, **options)(*args)
        return compress_p.bind(*args, jaxpr=jaxpr, how=self)

    def of(self, inputs):
        """Returns the `How` for a jaxpr with other inputs."""
        inputs = tuple(inputs)
        if inputs not in self.others:
            like = self.like and self.like.of(inputs)
            self.others[inputs] = How(self.marker, inputs, self.prevent_cse, self.saved, like)
        return self.others[inputs]

    def checkpoint(self, args, jaxpr, policy):
        # Under `jax_remat3`, `jax.checkpoint` uses another table of rules, so this binds `remat_p`.
        return remat_p.bind(*args, jaxpr=jaxpr, **self.checkpoint_params(jaxpr, policy))

    def checkpoint_params(self, jaxpr, policy):
        made = [
            (e.primitive, getattr(v.aval, "dtype", bool))
            for e in every_equation(jaxpr)
            for v in e.outvars
        ]
        made = frozenset(p for p, dtype in made if jnp.issubdtype(dtype, jnp.complexfloating))
        if made and policy is not only_stored:
            policy = _without(made, policy)
        return dict(prevent_cse=self.prevent_cse, differentiated=False, policy=policy)


@functools.lru_cache
def _without(made, policy):
    """The policy, but it saves no result of the primitives `made`, which make complex numbers.

    JAX reduces the precision of what a policy saves, and cannot do so with complex numbers.
    """
    return lambda prim, *avals, **params: prim not in made and policy(prim, *avals, **params)


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
    own = how.of((*[Input.PARAMETER] * len(closed.consts), *how.inputs))
    results = compress_p.bind(*closed.consts, *args, jaxpr=without_consts(closed.jaxpr), how=own)
    return results, [0 if one else None for one in is_batched]


batching.fancy_primitive_batchers[compress_p] = _batch


def _check(errors, args, closed, *, how):
    count = len(closed.consts) + len(errors)
    own = how.of((*[Input.PARAMETER] * count, *how.inputs))
    return compress_p.bind(
        *closed.consts, *errors, *args, jaxpr=without_consts(closed.jaxpr), how=own
    )


add_checkify_rule(compress_p, _check)


def _transpose(cotangents, *args, jaxpr, how):
    """Transposes as `jax.checkpoint` does: a linear argument is not saved, so it is not rounded."""
    params = how.checkpoint_params(jaxpr, how.marker.policy)
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
        params={"jaxpr": part, "how": how.of(itertools.compress(how.inputs, used))},
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
    own = how.of(itertools.compress(how.inputs, used))
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
    known, key = _derivatives(jaxpr), (how.like or how, varied, tuple(map(jax.typeof, leaves)))
    if key not in known:
        known[key] = _differentiated(*given, varied, jaxpr, how)
    body, policy, consts, is_real, saved = known[key]
    if how.saved is not None:
        how.saved.before, how.saved.after = saved
    count = len(jaxpr.outvars)
    results = how.checkpoint([*consts, *leaves], body, policy)
    y, dy = results[:count], iter(results[count:])
    return y, [
        next(dy) if real else ad.Zero(jax.typeof(a).to_tangent_aval())
        for real, a in zip(is_real, y, strict=True)
    ]


ad.primitive_jvps[compress_p] = _jvp


@weakref_lru_cache
def _with_checkpoints(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Makes checkpoints of all compressed functions inside, so that the outermost one decides.

    The policy of the outermost `jax.checkpoint` decides in the same way.
    """
    new = []
    for eqn in jaxpr.eqns:
        has_own_rule = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        bodies = [] if has_own_rule else jaxprs.bodies(eqn)
        changed = list(map(_with_checkpoints, bodies))
        if eqn.primitive is compress_p:
            how, body = eqn.params["how"], _with_checkpoints(eqn.params["jaxpr"])
            params = {"jaxpr": body, **how.checkpoint_params(body, how.marker.policy)}
            eqn = eqn.replace(primitive=remat_p, params=params)
        elif any(one is not body for one, body in zip(changed, bodies, strict=True)):
            eqn = jaxprs.with_bodies(eqn, changed)
        new.append(eqn)
    is_same = all(a is b for a, b in zip(new, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=new)


def _differentiated(primals, tangents, varied, jaxpr, how):
    """Returns the jaxpr of `jax.jvp`, its policy, its constants, which results vary, and bytes."""
    run = core.jaxpr_as_fun(core.ClosedJaxpr(_with_checkpoints(jaxpr), ()))

    def pushed(primals, tangents):
        def of_varied(*given):
            filled = dict(enumerate(primals)) | dict(zip(varied, given, strict=True))
            return list(run(*filled.values()))

        y, dy = jax.jvp(of_varied, [primals[i] for i in varied], tangents)
        return y, [None if d.dtype == jax.dtypes.float0 else d for d in dy]

    closed, (y, dy) = jax.make_jaxpr(pushed, return_shape=True)(primals, tangents)
    body, is_real = without_consts(closed.jaxpr), [d is not None for d in dy]
    rounds = any(name is not None for name in how.marker.formats.values())
    inputs = (*[Input.PARAMETER] * len(closed.consts), *how.inputs)
    given = [Fact()] * len(closed.consts)
    given += [
        Fact(activation=rounds and one is not Input.PARAMETER, varied=i in varied, at_hand=True)
        for i, one in enumerate(how.inputs)
    ]
    given += [Fact(linear=True)] * len(tangents)
    wanted = [False] * len(y) + [True] * sum(is_real)
    kept = [one is Input.KEPT for one in inputs] + [False] * len(tangents)
    marked = how.marker.mark(body, given, wanted, kept)
    saved = None, None
    if how.saved is not None and not jaxprs.has_symbolic_sizes(body):
        counted = [one is Input.ACTIVATION for one in inputs]
        before = _saved_bytes(body, counted, how.marker.policy)
        saved = before, (after := _saved_bytes(marked, counted, only_stored))
        if after >= before and not body.effects:
            # The input of a model's first block is data, which is not rounded.
            if any(fact.lossy for fact in given):
                how.saved.warn(how.marker.owner, before, after)
            return body, how.marker.policy, closed.consts, is_real, saved
    return marked, only_stored, closed.consts, is_real, saved


def _saved_bytes(jaxpr: core.Jaxpr, counted: Sequence[bool], policy: Callable[..., Any]) -> int:
    """The bytes that `jax.checkpoint` saves between the forward and the backward.

    Args:
      jaxpr: the jaxpr of a differentiated function; its last inputs are tangents.
      counted: which of its first inputs count if they are saved.
    """
    is_tangent = [False] * len(counted) + [True] * (len(jaxpr.invars) - len(counted))
    saved, is_read = saved_by_checkpoint(jaxpr, is_tangent, policy)
    inputs = zip(jaxpr.invars, is_read, counted, strict=False)  # the tangents are left out
    saved += [var.aval for var, *is_saved in inputs if all(is_saved)]
    return sum(array_bytes(aval.shape, aval.dtype) for aval in saved)
