"""The primitive `store`: an identity that saves its value for the backward in another format.

Its rule of partial evaluation, which `jax.checkpoint` calls, becomes `encode` in the forward and
`decode` in the backward. No other part of the library knows how residuals are stored. `rewritten`
inserts it into a jaxpr.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Recompute
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import partial_eval_jaxpr_custom_rules

from lowmembp_jax._jax_internals import cache, debug_callback_p, debug_print_p
from lowmembp_jax.compression import jaxprs
from lowmembp_jax.compression._bounds import bound_of, norms_of, useful
from lowmembp_jax.compression.formats import FORWARD, NO_SECOND_DERIVATIVE, Format
from lowmembp_jax.compression.observing import Place, observe, observer, place

#: Its operands are x, and the norms that bound x if the format has `terms`.
store_p = core.Primitive("store")
store_p.def_impl(lambda x, *_, format: x)
store_p.def_abstract_eval(lambda x, *_, format: x)
mlir.register_lowering(store_p, lambda ctx, x, *_, format: [x])


def _jvp(primals, tangents, *, format):
    if not format.is_exact:
        raise NotImplementedError(f"{format.owner} {NO_SECOND_DERIVATIVE}")
    return store_p.bind(*primals, format=format), tangents[0]


def _batch(args, dims, **params):
    [size] = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    # The norms broadcast against x.
    args = [
        batching.bdim_at_front(x, d, size if i == 0 else 1)
        for i, (x, d) in enumerate(zip(args, dims, strict=True))
    ]
    return store_p.bind(*args, **params), 0


def _transpose(cotangent, x, *norms, **params):
    return [cotangent, *[None] * len(norms)]


ad.primitive_jvps[store_p] = _jvp
ad.primitive_transposes[store_p] = _transpose
batching.primitive_batchers[store_p] = _batch


def only_stored(prim: Any, /, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that saves only the results of `store`.

    JAX runs debugging callbacks again in the backward, unless the policy saves them.
    """
    return prim in (store_p, debug_callback_p, debug_print_p)


@cache()
def _encoding(
    format: Format, avals: tuple[Any, ...], mesh: Any, number: int, at: Place | None
) -> core.JaxprEqn:
    """Makes one call equation that returns x and the stored arrays."""

    def encode(x, *norms):
        stored = format.encode(x, *norms)
        if format.host:
            stored = jax.device_put(stored, jax.memory.Space.Host)
        if at and not format.is_exact:
            observe(number, at, x, stored[0], format.decode(stored, x.dtype))
        return [x, *stored]

    return jaxprs.call_of(encode, *avals)


@cache()
def _decoding(format: Format, dtype: Any, avals: tuple[Any, ...], mesh: Any):
    def decode(*stored):
        if format.host:
            stored = jax.device_put(stored, jax.memory.Space.Device)
        if len(stored) > 1:
            # In a loop without the barriers of `jax.checkpoint`, XLA would otherwise decode in the
            # kernel that reads from the stack, long before the numbers are needed.
            stored = (stored[0], *lax.optimization_barrier(stored[1:]))
        return [format.decode(stored, dtype)]

    return jaxprs.call_of(decode, *avals)


def _split(saveable, unknown, instantiated, eqn):
    """Splits `eqn` for the forward and the backward.

    Returns both equations, which results are unknown, which are staged, and the residuals.
    """
    format, aval = eqn.params["format"], eqn.invars[0].aval
    if unknown[0]:
        return None, eqn, [True], [True], []
    if saveable(store_p, aval, **eqn.params) in (False, Recompute):  # an outer checkpoint
        pairs = zip(eqn.invars, instantiated, strict=True)
        new = [v for v, one in pairs if isinstance(v, core.Var) and not one]
        return eqn, eqn, [False], [True], new
    if format.storage == FORWARD:
        return eqn, None, [False], [False], []
    is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
    if format.storage is None and not is_complex and not format.host:
        return eqn, None, [False], [False], []
    mesh = jax.sharding.get_abstract_mesh()
    number = observer()
    avals = tuple(atom.aval for atom in eqn.invars)
    known = _encoding(format, avals, mesh, number, place(eqn) if number else None)
    stored: list[Any] = [core.Var(var.aval) for var in known.outvars[1:]]
    staged = _decoding(format, aval.dtype, tuple(var.aval for var in stored), mesh)
    own = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    known = known.replace(invars=eqn.invars, outvars=[*eqn.outvars, *stored], **own)
    staged = staged.replace(invars=stored, outvars=eqn.outvars, **own)
    return known, staged, [False], [True], stored


partial_eval_jaxpr_custom_rules[store_p] = _split


@dataclass
class Plan:
    """What to rewrite in a jaxpr.

    Attributes:
      stores: the formats of stored variables.
      barriers: variables that are read behind a barrier. These are products behind a stored array
        that the forward also reads elementwise: XLA encodes an array in the kernel of such a
        reader, but not if it sees that a kernel of a product makes the array. And maxima that a
        stored softmax subtracts: XLA for TPUs puts the maximum into the kernel of the exponential,
        and then writes this in float32 before it is encoded. And sums by which it divides: XLA for
        GPUs makes one kernel of the sum and the quotient, which writes the quotient in float32.
      effects: numbers of the equations with side effects, which run only in the forward.
      inside: a plan for each body of each equation, by the equation's number.
    """

    stores: dict[Any, Format] = field(default_factory=dict)
    barriers: set[Any] = field(default_factory=set)
    effects: set[int] = field(default_factory=set)
    inside: dict[int, list["Plan"]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stores or self.effects) or any(map(any, self.inside.values()))


def rewritten(jaxpr: core.Jaxpr, plan: Plan) -> core.Jaxpr:
    """Inserts the stores of a plan; readers of a stored array then read the result of `store`."""
    new, stored = [], dict[Any, Any]()
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    bounds = {var: bound_of(var, made) for var, one in plan.stores.items() if one.may_be_bounded}
    bounds = useful({var: bound for var, bound in bounds.items() if bound})

    def apply(primitive, var, *others, **params):
        result = core.Var(var.aval)
        like = jaxpr.eqns[0] if not new else new[-1]
        own = {"primitive": primitive, "params": params, "effects": set()}
        new.append(like.replace(invars=[var, *others], outvars=[result], **own))
        return result

    def store(var, format, bound=None, like=None):
        if bound is None:
            return apply(store_p, var, format=format)
        new.append(norms := norms_of(bound, like))
        format = format._replace(terms=tuple(map(len, bound)))
        return apply(store_p, var, *norms.outvars, format=format)

    def forward(atom):
        return store(atom, Format(FORWARD, "")) if isinstance(atom, core.Var) else atom

    def read(atom):
        return stored.get(atom, atom) if isinstance(atom, core.Var) else atom

    for var in jaxpr.invars:
        if var in plan.stores:
            stored[var] = store(var, plan.stores[var])
    for number, eqn in enumerate(jaxpr.eqns):
        plans = plan.inside.get(number, ())
        if any(plans):
            bodies = map(rewritten, jaxprs.bodies(eqn), plans)
            eqn = jaxprs.with_bodies(eqn, list(bodies))
        if number in plan.effects:
            new.append(eqn.replace(invars=[forward(atom) for atom in eqn.invars]))
        else:
            new.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
        for var in eqn.outvars:
            if var in plan.barriers:
                stored[var] = apply(lax.optimization_barrier_p, var)
            if var in plan.stores:
                stored[var] = store(read(var), plan.stores[var], bounds.get(var), eqn)
    return jaxpr.replace(eqns=new, outvars=[read(atom) for atom in jaxpr.outvars])
