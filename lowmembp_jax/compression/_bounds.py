"""Bounds of the elements of products, which are known before the products are.

float8 needs a scale that no element of a row exceeds. The maximum of a row is known when the row is
complete, so another kernel must read the row again and encode it. For a product y = x w + b,
Cauchy and Schwarz bound each element by the norms of a row of x and of a column of w:

    |y[t, n]| <= |x[t]| |w[:, n]| + |b[n]|

Then XLA encodes y in the kernel that makes it or that reads it first. Typical numbers are 1/50 of
the bound. float8 is a floating format, so it rounds them as well as with the row's maximum.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from lowmembp_jax._jax_internals import operation
from lowmembp_jax._tiling import is_whole
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression._scaled_float8 import factor_of, norms


class Factor(NamedTuple):
    """Norms of an array.

    Attributes:
      of: the variable that has the array.
      axes: the axes over which the norms are taken.
      shaped: gives the norms the rank of the bounded array, in whose axes they broadcast.
    """

    of: Any
    axes: tuple[int, ...]
    shaped: Callable[[Array], Array]


#: A sum of products of factors.
Bound = tuple[tuple[Factor, ...], ...]


def bound_of(atom: Any, made: Mapping[Any, Any]) -> Bound | None:
    """The bound of a variable's elements, or None if no product makes it.

    Args:
      made: the equations of the jaxpr by their results.
    """
    if isinstance(atom, core.Literal) or atom not in made:
        return None
    eqn = made[atom]
    if not all(isinstance(n, int) for v in eqn.invars for n in getattr(v.aval, "shape", ())):
        return None  # a symbolic size of `jax.export`
    shape, name = atom.aval.shape, operation(eqn)
    if name == "dot_general":
        return _of_product(eqn)
    if name in ("add", "sub"):
        bounds = [bound_of(v, made) or _of_small(v, shape) for v in eqn.invars]
        return None if None in bounds else bounds[0] + bounds[1]  # type: ignore
    is_same = eqn.invars[0].aval.shape == shape and not eqn.params.get("dimensions")
    if not is_same or not rules.rule(eqn).passes or name in ("reshard", "rev", "transpose"):
        return None
    return bound_of(eqn.invars[0], made)


def _of_product(eqn: Any) -> Bound | None:
    (contracted, batch), (x, w) = eqn.params["dimension_numbers"], eqn.invars
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (x, w)):
        return None
    free = [
        [i for i in range(v.aval.ndim) if i not in (*contracted[side], *batch[side])]
        for side, v in enumerate((x, w))
    ]
    factors = []
    for side, v in enumerate((x, w)):
        axes = tuple(contracted[side])
        if isinstance(v, core.Literal) or not is_whole(v.aval, axes):
            return None
        kept = [i for i in range(v.aval.ndim) if i not in axes]
        order = [kept.index(i) for i in (*batch[side], *free[side])]
        at = len(batch[0]) + len(free[0]) if side == 0 else len(batch[0])
        new = tuple(range(at, at + len(free[1 - side])))

        def shaped(x, order=order, new=new):
            return jnp.expand_dims(jnp.transpose(x, order), new)

        factors.append(Factor(v, axes, shaped))
    return (tuple(factors),)


def _of_small(atom: Any, shape: tuple[int, ...]) -> Bound | None:
    """The bound of an array with axes of size 1 that is broadcast to `shape`, such as a bias."""
    is_floating = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    if isinstance(atom, core.Literal) or not is_floating or atom.aval.shape == shape:
        return None
    return ((Factor(atom, (), lambda x: x),),)


def useful(bounds: Mapping[Any, Bound]) -> dict[Any, Bound]:
    """Leaves out the bounds whose norms would read more numbers than they save.

    The maximum of a row reads an array once more. Norms of an array are computed once.
    """
    gain: dict[Any, int] = {}
    for var, bound in bounds.items():
        first: Any = max((factor.of for factor in bound[0]), key=lambda v: v.aval.size)
        others = [f.of.aval.size for term in bound for f in term if f.of is not first]
        gain.setdefault(first, -first.aval.size)
        gain[first] += 2 * var.aval.size - sum(others)
    return {v: bound for v, bound in bounds.items() if any(gain.get(f.of, 0) > 0 for f in bound[0])}


def norms_of(bound: Bound, like: Any) -> core.JaxprEqn:
    """An equation at the place of `like` whose results are the norms of the factors."""
    factors = [factor for term in bound for factor in term]
    scales = [
        factor_of(place, len(term), len(bound)) for term in bound for place in range(len(term))
    ]

    def compute(*arrays):
        each = zip(factors, scales, arrays, strict=True)
        return [factor.shaped(norms(x, factor.axes, scale)) for factor, scale, x in each]

    eqn = jaxprs.call_of(compute, *(factor.of.aval for factor in factors))
    own = {"source_info": like.source_info, "ctx": like.ctx}
    results = [core.Var(var.aval) for var in eqn.outvars]
    return eqn.replace(invars=[factor.of for factor in factors], outvars=results, **own)
