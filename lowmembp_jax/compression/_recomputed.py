"""Functions that the backward computes again from rounded numbers, to their precision.

After a Dense with a bias, an activation's backward computes three results from the Dense's output:
the activation, for the gradient of the next Dense's kernel; its slope times the cotangent; and the
sum of this product over rows, for the gradient of the bias. XLA puts all three into one kernel, but
not erf, erfc and tanh, which it writes to memory in a kernel of their own. Arithmetic bounds this
kernel: erf and erfc take about 90 instructions an element.

The backward reads numbers of at most 8 bits, so it computes polynomials, within 2^-14. XLA puts
these into the one kernel. The forward is exact, and so is float64, which nobody chooses for speed.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Recompute
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.interpreters.partial_eval import partial_eval_jaxpr_custom_rules
from jaxtyping import Array

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.compression._store import only_stored, store_p

#: For x >= 0, erfc(x) is within 3.2e-5 of max(P(x), 0)^4. P(0) is 1 and P is negative above 3.17.
_P = (
    1.0, -0.2819014009298848, -0.12064943222245703, 0.01738047022079809, 0.019335007182721044,
    -0.004376468870945554,
)  # fmt: skip


def _erfc_of_size(x: Array) -> Array:
    """erfc(|x|), in float32."""
    size, p = jnp.abs(x.astype(jnp.float32)), jnp.float32(_P[-1])
    for coefficient in _P[-2::-1]:
        p = p * size + coefficient
    return jnp.square(jnp.square(jnp.maximum(p, 0)))


def _erf(x: Array) -> Array:
    y = _erfc_of_size(x)
    z = x.astype(jnp.float32)
    # Near 0 the difference from 1 would cancel. There, erf(x) is a series.
    near = z * (1.1283791670955126 - 0.37612638903183754 * jnp.square(z))
    far = jnp.where(z < 0, y - 1, 1 - y)
    return jnp.where(jnp.abs(z) < 2.0**-6, near, far).astype(x.dtype)


def _erfc(x: Array) -> Array:
    y = _erfc_of_size(x)
    return jnp.where(x < 0, 2 - y, y).astype(x.dtype)


def _tanh(x: Array) -> Array:
    # From exp(z / 8) - 1, a series, squaring four times leads to exp(2 z) - 1. Nothing cancels near
    # 0. If two operations read z itself, XLA writes the result to memory.
    z = jnp.clip(x.astype(jnp.float32), -10, 10) / 8
    y = z * (1 + z * (1 / 2 + z * (1 / 6 + z / 24)))
    for _ in range(4):
        y = y * (y + 2)
    return (y / (y + 2)).astype(x.dtype)


#: The exact and the approximate function, by the primitive's name.
_FUNCTIONS = {"erf": (lax.erf, _erf), "erfc": (lax.erfc, _erfc), "tanh": (lax.tanh, _tanh)}


def _run(x, *, name, again):
    return _FUNCTIONS[name][again](x)


recomputed_p = core.Primitive("recomputed")
recomputed_p.def_impl(_run)
recomputed_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(recomputed_p, mlir.lower_fun(_run, multiple_results=False))
batching.defvectorized(recomputed_p)


def _split(saveable, unknown, instantiated, eqn):
    """Splits `eqn` as JAX does, but the backward computes the approximate function."""
    x, staged = eqn.invars[0], eqn
    if unknown[0]:
        return None, eqn, [True], [True], []
    if saveable(recomputed_p, x.aval, **eqn.params) not in (False, Recompute):
        return eqn, None, [False], [False], []
    if saveable is only_stored:  # an outer checkpoint runs the forward again
        staged = eqn.replace(params=eqn.params | {"again": True})
    return eqn, staged, [False], [True], [] if instantiated[0] else [x]


partial_eval_jaxpr_custom_rules[recomputed_p] = _split


def _is_replaced(eqn: Any) -> bool:
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    return name in _FUNCTIONS and jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float64


def with_recomputed(jaxpr: core.Jaxpr, rounded: Sequence[bool]) -> tuple[core.Jaxpr, list[bool]]:
    """Finds the functions in a marked jaxpr that the backward computes from rounded numbers.

    Args:
      rounded: which inputs the backward reads rounded.

    Returns:
      The jaxpr, and which of its results the backward reads rounded.
    """
    found = {var for var, one in zip(jaxpr.invars, rounded, strict=True) if one}
    new: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        bodies = jaxprs.bodies(eqn)
        read = [isinstance(atom, core.Var) and atom in found for atom in jaxprs.operands(eqn)]
        results = [any(read)] * len(eqn.outvars)
        if eqn.primitive is store_p:
            results = [not eqn.params["format"].is_exact] * len(eqn.outvars)
        elif bodies:
            back = jaxprs.carried(eqn, bodies[0])  # a loop's first step may differ from the others
            read = [one and out is None for one, out in zip(read, back, strict=True)]
            changed, each = zip(*(with_recomputed(body, read) for body in bodies), strict=True)
            results = [all(branches) for branches in zip(*each, strict=True)]
            if any(one is not body for one, body in zip(changed, bodies, strict=True)):
                eqn = jaxprs.with_bodies(eqn, changed)
        elif any(read) and _is_replaced(eqn):
            params = {"name": eqn.primitive.name, "again": False}
            eqn = eqn.replace(primitive=recomputed_p, params=params)
        found.update(itertools.compress(eqn.outvars, results))
        new.append(eqn)
    is_same = all(a is b for a, b in zip(new, jaxpr.eqns, strict=True))
    outputs = [isinstance(atom, core.Var) and atom in found for atom in jaxpr.outvars]
    return jaxpr if is_same else jaxpr.replace(eqns=new), outputs
