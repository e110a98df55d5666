"""Calls a traced function on slices of its activations, and differentiates it slice by slice."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend import core
from jax.sharding import NamedSharding

from lowmembp_jax._arguments import is_inexact
from lowmembp_jax._jax_internals import varying
from lowmembp_jax._random_keys import folded
from lowmembp_jax._tiling import explicit_spec


class Inputs(NamedTuple):
    """The arrays that a function reads, in groups.

    Attributes:
      closed: for the jaxpr of each size of slices, the values that it closes over.
      whole: parameters and random keys.
      cut: activations.
    """

    closed: tuple[list[Any], ...]
    whole: list[Any]
    cut: list[Any]


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Slices:
    """How a function runs on slices.

    Attributes:
      jaxprs: the function on slices of `size`, and on the shorter last slice, if there are such
        slices. Their inputs are the values that they close over, and the other two groups.
      keys: for each jaxpr, the numbers of the inputs that are random keys.
      axis, size: as in `tiled`.
      length: the positions on the axis.
    """

    jaxprs: tuple[core.Jaxpr, ...]
    keys: tuple[Set[int], ...]
    axis: int
    size: int
    length: int

    def along(self, x: Any) -> int:
        return self.axis % x.ndim

    def sizes(self) -> list[tuple[int, int, int]]:
        """The first position, the number of slices and their size, for each jaxpr."""
        whole = self.length // self.size
        found = [(0, whole, self.size), (whole * self.size, 1, self.length % self.size)]
        return [one for one in found if one[1] and one[2]] or [(0, 1, 0)]

    def cut(self, arrays: Sequence[Any], start: Any, size: int) -> list[Any]:
        return [lax.dynamic_slice_in_dim(x, start, size, self.along(x)) for x in arrays]

    def put(self, buffers: Sequence[Any], slices: Sequence[Any], start: Any) -> list[Any]:
        return [
            lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, self.along(x))
            for x, part in zip(buffers, slices, strict=True)
        ]

    def over(self, step: Callable[..., Any], carry: Any) -> Any:
        """Calls `step(carry, number of the jaxpr, start, size, number of the slice)`."""
        done = 0
        for number, (first, count, size) in enumerate(self.sizes()):
            if count == 1:
                carry = step(carry, number, first, size, done)
            else:
                carry = lax.scan(
                    lambda carry, i, n=number, size=size: (step(carry, n, i * size, size, i), None),
                    carry,
                    jnp.arange(count),
                )[0]
            done += count
        return carry

    def call(self, number: int, closed: Any, whole: Any, cut: Any, index: Any) -> list[Any]:
        """Calls the function on a slice, with random keys of the slice's own."""
        inputs = [*closed, *whole, *cut]
        for i in self.keys[number]:
            inputs[i] = folded(inputs[i], index)
        return eval_jaxpr(self.jaxprs[number], (), *inputs)


def _zeros(type: Any, axis: int, length: int) -> Any:
    shape = (*type.shape[:axis], length, *type.shape[axis + 1 :])
    spec = explicit_spec(type)
    sharding = None if spec is None else NamedSharding(type.sharding.mesh, spec)
    zeros = jnp.zeros(shape, type.dtype, out_sharding=sharding)
    axes = tuple(varying(type))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


@jax.custom_vjp
def by_slices(how: Slices, inputs: Inputs) -> list[Any]:
    def step(results, number, start, size, index):
        cut = how.cut(inputs.cut, start, size)
        own = how.call(number, inputs.closed[number], inputs.whole, cut, index)
        return how.put(results, own, start)

    types: list[Any] = [var.aval for var in how.jaxprs[0].outvars]
    return how.over(step, [_zeros(one, how.along(one), how.length) for one in types])


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Which arrays of `Inputs` are differentiated."""

    flags: tuple[bool, ...]


def _forward(how, inputs):
    primals, tree = jax.tree.flatten(inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    values = tree.unflatten(x.value for x in primals)
    wanted = tuple(x.perturbed and is_inexact(x.value) for x in primals)
    return by_slices(how, values), (how, values, _Wanted(wanted))


def _backward(saved, cotangents):
    how, inputs, wanted = saved
    wanted = jax.tree.unflatten(jax.tree.structure(inputs), wanted.flags)
    real = [i for i, g in enumerate(cotangents) if not isinstance(g, SymbolicZero)]
    real = [i for i in real if is_inexact(cotangents[i])]

    def chosen(group: str) -> list[Any]:
        pairs = zip(getattr(inputs, group), getattr(wanted, group), strict=True)
        return [x for x, is_wanted in pairs if is_wanted]

    def filled(group, flags, some):
        some = iter(some)
        return [next(some) if one else x for x, one in zip(group, flags, strict=True)]

    def step(carry, number, start, size, index):
        whole, closed, cut = carry
        flags = wanted.closed[number]
        own = [x for x, one in zip(inputs.closed[number], flags, strict=True) if one]

        def results(own, some, parts):
            found = how.call(
                number,
                filled(inputs.closed[number], flags, own),
                filled(inputs.whole, wanted.whole, some),
                filled(how.cut(inputs.cut, start, size), wanted.cut, parts),
                index,
            )
            return [found[i] for i in real]

        parts = how.cut(chosen("cut"), start, size)
        _, vjp = jax.vjp(results, own, chosen("whole"), parts)
        d_own, d_whole, d_cut = vjp(how.cut([cotangents[i] for i in real], start, size))
        closed = (*closed[:number], _sum(closed[number], d_own), *closed[number + 1 :])
        return _sum(whole, d_whole), closed, how.put(cut, d_cut, start)

    closed = tuple(
        [_wide(x) for x, one in zip(values, flags, strict=True) if one]
        for values, flags in zip(inputs.closed, wanted.closed, strict=True)
    )
    cut = [jnp.zeros_like(x) for x in chosen("cut")]
    whole, closed, cut = how.over(step, (list(map(_wide, chosen("whole"))), closed, cut))

    def spread(found, flags, like):
        found = iter(found)
        pairs = zip(like, flags, strict=True)
        return [next(found).astype(x.dtype) if one else None for x, one in pairs]

    return None, Inputs(
        tuple(map(spread, closed, wanted.closed, inputs.closed)),
        spread(whole, wanted.whole, inputs.whole),
        spread(cut, wanted.cut, inputs.cut),
    )


by_slices.defvjp(_forward, _backward, symbolic_zeros=True)


def _wide(x: Any) -> Any:
    """Zeros to sum gradients in: at least float32."""
    return jnp.zeros_like(x, dtype=jnp.float32 if x.dtype.itemsize < 4 else x.dtype)


def _sum(totals: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    return [t + g.astype(t.dtype) for t, g in zip(totals, gradients, strict=True)]
