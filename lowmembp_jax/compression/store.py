"""The primitive `store`: an identity whose value waits for the backward in another format.

Its rule of partial evaluation, which `jax.checkpoint` asks, turns it into `encode` in the forward
and `decode` in the backward. Nothing else in the library knows how residuals are stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Recompute
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import partial_eval_jaxpr_custom_rules

from lowmembp_jax.compression.formats import NO_SECOND_DERIVATIVE, decode, encode


class Format(NamedTuple):
    """How an array is stored.

    Attributes:
      dtype: of the stored array; None stores the array itself.
      scale: a power of two that the array is multiplied by before it is stored.
      owner: names the function in the error for a second derivative.
    """

    dtype: jnp.dtype | None
    scale: float
    owner: str

    @property
    def is_exact(self) -> bool:
        """Whether `decode(encode(x))` is x: of booleans in 2 bits and of what stays as it is."""
        return self.dtype is None or self.dtype == jnp.uint2

    def encode(self, x: jax.Array) -> list[jax.Array]:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return [lax.real(x), lax.imag(x)]  # JAX cannot save complex residuals
        scaled = x if self.scale == 1 else x * self.scale
        return jax.tree.leaves(encode(scaled, self.dtype, self.owner))

    def decode(self, dtype: Any, *stored: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return lax.complex(*stored)
        x = decode(stored[0] if len(stored) == 1 else stored, self.dtype, dtype)
        return x if self.scale == 1 else x / self.scale


store_p = core.Primitive("store")
store_p.def_impl(lambda x, *, format: x)
store_p.def_abstract_eval(lambda x, *, format: x)
mlir.register_lowering(store_p, lambda ctx, x, *, format: [x])


def _jvp(primals, tangents, *, format):
    if not format.is_exact:
        raise NotImplementedError(f"{format.owner} {NO_SECOND_DERIVATIVE}")
    return store_p.bind(*primals, format=format), tangents[0]


def _batch(args, dims, *, format):
    return store_p.bind(jnp.moveaxis(args[0], dims[0], 0), format=format), 0  # rows stay rows


ad.primitive_jvps[store_p] = _jvp
batching.primitive_batchers[store_p] = _batch


def only_stored(prim: Any, *_: Any, **__: Any) -> bool:
    """The policy of `jax.checkpoint` that saves what is stored, and nothing else."""
    return prim is store_p


@functools.lru_cache(maxsize=4096)
def _encoding(format: Format, aval: Any, mesh: Any) -> core.JaxprEqn:
    """One equation, a call, that gives x and what is stored of it."""
    return jax.make_jaxpr(jax.jit(lambda x: [x, *format.encode(x)]))(aval).jaxpr.eqns[0]


@functools.lru_cache(maxsize=4096)
def _decoding(format: Format, dtype: Any, avals: tuple[Any, ...], mesh: Any) -> core.JaxprEqn:
    decoded = jax.jit(functools.partial(format.decode, dtype))
    return jax.make_jaxpr(decoded)(*avals).jaxpr.eqns[0]


def _split(saveable, unknown, instantiated, eqn):
    """`eqn` in the forward and in the backward; whether results are unknown, staged; residuals."""
    [x], [y], format = eqn.invars, eqn.outvars, eqn.params["format"]
    if unknown[0]:
        return None, eqn, [True], [True], []
    if saveable(store_p, x.aval, **eqn.params) in (False, Recompute):  # of another checkpoint
        is_new = isinstance(x, core.Var) and not instantiated[0]
        return eqn, eqn, [False], [True], [x] * is_new
    if format.dtype is None and not jnp.issubdtype(y.aval.dtype, jnp.complexfloating):
        return eqn, None, [False], [False], []
    mesh = jax.sharding.get_abstract_mesh()
    forward = _encoding(format, x.aval, mesh)
    stored = [core.Var(var.aval) for var in forward.outvars[1:]]
    backward = _decoding(format, y.aval.dtype, tuple(var.aval for var in stored), mesh)
    own = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    known = forward.replace(invars=[x], outvars=[y, *stored], **own)
    return known, backward.replace(invars=stored, outvars=[y], **own), [False], [True], stored


partial_eval_jaxpr_custom_rules[store_p] = _split
