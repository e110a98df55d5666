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
      unit: whether all elements are known to lie between 0 and 1, as in a softmax. float8 stores
        256 times each element, and the integer formats store its square root.
      owner: names the function in the error for a second derivative.
    """

    dtype: jnp.dtype | None
    unit: bool
    owner: str

    @property
    def is_exact(self) -> bool:
        """Whether `decode(encode(x))` is x: of booleans in 2 bits and of what stays as it is."""
        return self.dtype is None or self.dtype == jnp.uint2

    def encode(self, x: jax.Array) -> list[jax.Array]:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return [lax.real(x), lax.imag(x)]  # JAX cannot save complex residuals
        if self.unit:
            x = x * 256 if self._is_float else jnp.sqrt(x)
        return jax.tree.leaves(encode(x, self.dtype, self.owner))

    def decode(self, dtype: Any, *stored: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return lax.complex(*stored)
        x = decode(stored[0] if len(stored) == 1 else stored, self.dtype, dtype)
        if self.unit:
            x = x / 256 if self._is_float else jnp.square(x)
        return x

    @property
    def _is_float(self) -> bool:
        return self.dtype is not None and jnp.issubdtype(self.dtype, jnp.floating)


#: `times`: how many results there are, all of them x, each read from memory by itself.
store_p = core.Primitive("store")
store_p.multiple_results = True
store_p.def_impl(lambda x, *, format, times: [x] * times)
store_p.def_abstract_eval(lambda x, *, format, times: [x] * times)
mlir.register_lowering(store_p, lambda ctx, x, *, format, times: [x] * times)


def _jvp(primals, tangents, *, format, times):
    if not format.is_exact:
        raise NotImplementedError(f"{format.owner} {NO_SECOND_DERIVATIVE}")
    return store_p.bind(*primals, format=format, times=times), [tangents[0]] * times


def _batch(args, dims, **params):
    return store_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), [0] * params["times"]


ad.primitive_jvps[store_p] = _jvp
batching.primitive_batchers[store_p] = _batch


def only_stored(prim: Any, *_: Any, **__: Any) -> bool:
    """The policy of `jax.checkpoint` that saves what is stored, and nothing else."""
    return prim is store_p


@functools.lru_cache(maxsize=4096)
def _encoding(format: Format, times: int, aval: Any, mesh: Any) -> core.JaxprEqn:
    """One equation, a call, that gives x, as often as asked for, and what is stored of it."""
    encode = jax.jit(lambda x: [*[x] * times, *format.encode(x)])
    return jax.make_jaxpr(encode)(aval).jaxpr.eqns[0]


@functools.lru_cache(maxsize=4096)
def _decoding(format: Format, times: int, dtype: Any, avals: tuple[Any, ...], mesh: Any):
    def decode(*stored):
        again = [stored, *(lax.optimization_barrier(stored) for _ in range(times - 1))]
        return [format.decode(dtype, *each) for each in again]

    return jax.make_jaxpr(jax.jit(decode))(*avals).jaxpr.eqns[0]


def _split(saveable, unknown, instantiated, eqn):
    """`eqn` in the forward and in the backward; whether results are unknown, staged; residuals."""
    [x], results, format = eqn.invars, eqn.outvars, eqn.params["format"]
    times, aval = len(results), x.aval
    if unknown[0]:
        return None, eqn, [True] * times, [True] * times, []
    if saveable(store_p, aval, **eqn.params) in (False, Recompute):  # of another checkpoint
        is_new = isinstance(x, core.Var) and not instantiated[0]
        return eqn, eqn, [False] * times, [True] * times, [x] * is_new
    if format.dtype is None and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return eqn, None, [False] * times, [False] * times, []
    mesh = jax.sharding.get_abstract_mesh()
    known = _encoding(format, times, aval, mesh)
    stored = [core.Var(var.aval) for var in known.outvars[times:]]
    staged = _decoding(format, times, aval.dtype, tuple(var.aval for var in stored), mesh)
    own = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    known = known.replace(invars=[x], outvars=[*results, *stored], **own)
    staged = staged.replace(invars=stored, outvars=results, **own)
    return known, staged, [False] * times, [True] * times, stored


partial_eval_jaxpr_custom_rules[store_p] = _split
