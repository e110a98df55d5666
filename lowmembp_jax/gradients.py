"""The distance of an approximate gradient from the exact gradient."""

import itertools
import reprlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import not_
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from lowmembp_jax._arguments import as_array, check_function, is_inexact
from lowmembp_jax._contexts import exact
from lowmembp_jax._messages import users_line
from lowmembp_jax.compression.observing import Stored, observed
from lowmembp_jax.memory.lowering.step_arguments import of_states
from lowmembp_jax.memory.saved_residuals.residuals import trained
from lowmembp_jax.patching._patch import patch

_GOOD = "(plain bfloat16: 0.01 to 0.03; errors of a few percent train as well as exact gradients)"
# bfloat16's rounding. The parameters do not tell in which dtype the loss computes.
_ROUNDING = 2**-7
_EQUAL = (
    "the gradients are equal: nothing was stored in fewer bits or approximated. If you expected "
    "otherwise, look whether the loss calls lm.compress, an operator of this library or lm.patch"
)
_ZERO = "(only rounding errors; relative to the largest gradient of the layer)"


@dataclass(frozen=True)
class Fidelity:
    """The distance of a gradient g from the exact gradient g*.

    Attributes:
      error: |g - g*| / |g*| over all parameters together; 0 if both are 0.
      cosine: the cosine of the angle between g and g*; 1 if both are 0.
      groups: a `Fidelity` for each group of parameters, without `groups` of its own.
      is_rounding: whether the exact gradient of a group seems to hold only rounding errors, such as
        the gradient of a key's bias in attention: it is less than 1/128 of the largest gradient of
        the layer, and more than half off. `error` is then relative to this largest gradient.
      stored: for each array that `lm.compress` stored in fewer bits, the largest magnitude and the
        shares of elements that were clipped and flushed to zero; only from `gradient_fidelity`.
    """

    error: float
    cosine: float
    groups: dict[str, "Fidelity"]
    stored: dict[str, Stored] = field(default_factory=dict)
    is_rounding: bool = False

    def __str__(self) -> str:
        if self.error == 0 and not self.stored:
            return _EQUAL
        rows = [("all parameters", self), *self.groups.items()]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}  relative error    cosine"]
        lines += [
            f"{name:{width}}  {one.error:14.4f}  "
            + (_ZERO if one.is_rounding else f"{one.cosine:8.5f}")
            for name, one in rows
        ]
        lines.append(_GOOD)
        if self.stored:
            width = max(map(len, self.stored))
            lines.append(f"{'':{width}}     largest   clipped   flushed to zero")
            lines += [
                f"{name:{width}}  {one.largest:10.3g}  {one.clipped:8.3%}  {one.flushed:16.3%}"
                for name, one in self.stored.items()
            ]
        return "\n".join(lines)


class _Leaf(NamedTuple):
    """The two gradients of one array of parameters."""

    path: tuple[Any, ...]
    got: np.ndarray
    exact: np.ndarray


def gradient_distance(got: PyTree, exact: PyTree, depth: int = 1) -> Fidelity:
    """Computes the distance of the gradient `got` from `exact`, in float64.

    Args:
      got: a tree of arrays.
      exact: a tree of arrays of the same structure and shapes.
      depth: parameters whose paths begin with the same `depth` keys are one group. Keys that all
        paths begin with do not count.

    Raises:
      ValueError: the trees differ in structure or shapes.
    """
    depth, leaves = _depth("gradient_distance", depth), []

    def add(path, g, e):
        if np.shape(g) != np.shape(e):
            raise ValueError(
                f"gradient_distance: got{jax.tree_util.keystr(path)}: expected the shape of "
                f"exact, {np.shape(e)}, got {np.shape(g)}"
            )
        leaves.append(_Leaf(path, _flat(g), _flat(e)))

    if (one := jax.tree.structure(got)) != (other := jax.tree.structure(exact)):
        raise ValueError(f"gradient_distance: got: expected a tree like exact, {other}, got {one}")
    jax.tree_util.tree_map_with_path(add, got, exact)
    shared = 0  # linen's trees have one key "params" at the top
    for keys in zip(*(leaf.path[:-1] for leaf in leaves), strict=False):
        if any(key != keys[0] for key in keys):
            break
        shared += 1
    groups: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        name = jax.tree_util.keystr(leaf.path[shared:][:depth], simple=True, separator="/")
        groups.setdefault(name, []).append(leaf)
    return _fidelity(leaves, {name: _of_group(group, leaves) for name, group in groups.items()})


def gradient_fidelity(
    loss: Callable[..., Float[Array, ""]],
    params: PyTree,
    *args: Any,
    depth: int = 1,
    **settings: Any,
) -> Fidelity:
    """Measures how far a model's gradient is from the exact gradient.

        print(lm.gradient_fidelity(loss, params, batch))                      # the model as it is
        print(lm.gradient_fidelity(loss, params, batch, compress="layer_*"))  # under lm.patch

    The loss runs once unchanged, or under `lm.patch` if there are `settings`, and once under
    `lm.exact()`, which makes `lm.compress`, the operators and `lm.patch` exact.

    Args:
      loss: a function of `params` and `args` that returns a scalar. Each run has its own `jax.jit`.
      params: the parameters of the gradient: its floating arrays, or the `nnx.Param`s of an NNX
        module.
      args: the other arguments of the loss.
      depth: parameters whose paths begin with the same `depth` keys are one group.
      settings: the arguments of `lm.patch`.

    Returns:
      The relative error and cosine, for all parameters and by group, and statistics of the arrays
      that `lm.compress` stored. Printed, they are tables. Training in plain bfloat16 has an error
      of 0.01 to 0.03.

    Raises:
      TypeError: `loss` is not callable.
      ValueError: `lm.patch` with these settings swaps nothing in the loss.
    """
    check_function(loss, "gradient_fidelity: loss")
    depth = _depth("gradient_fidelity", depth)

    loss, (params, *others) = of_states(loss, (params, *args), is_loss=True)
    args = tuple(others)
    leaves, tree = jax.tree.flatten(params)
    chosen = [one and is_inexact(leaf) for one, leaf in zip(trained(params), leaves, strict=True)]
    if not any(chosen):
        found = reprlib.repr(params)
        raise TypeError(f"gradient_fidelity: params: expected floating arrays, got {found}")

    def of_chosen(some, others, args):
        some, others = iter(some), iter(others)
        every = [next(some if one else others) for one in chosen]
        return loss(jax.tree.unflatten(tree, every), *args)

    def gradient():
        parts = (list(itertools.compress(leaves, flags)) for flags in (chosen, map(not_, chosen)))
        found = iter(jax.jit(jax.grad(of_chosen))(*parts, args))
        return jax.tree.unflatten(tree, [next(found) if one else None for one in chosen])

    with exact():
        want = gradient()
    with observed() as stored, patch(**settings) if settings else nullcontext() as report:
        got = jax.block_until_ready(gradient())
    if report is not None and not report.swapped and not any(report.differentiated):
        why = f"\n{report}" if report.skipped else ": it calls nothing that they name"
        raise ValueError(f"gradient_fidelity: these settings of lm.patch swap nothing{why}")
    named: dict[str, Stored] = {}
    for (kind, frames), one in stored.items():
        named.setdefault(f"{kind} {users_line(frames)}", Stored()).add(one)
    return replace(gradient_distance(got, want, depth), stored=named)


def _depth(function: str, depth: Any) -> int:
    if not isinstance(depth, int | np.integer) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"{function}: depth: expected a number from 1 on, got {depth!r}")
    return int(depth)


def _flat(x) -> np.ndarray:
    """The numbers of an array in float64; complex numbers as pairs of real ones."""
    as_array(x, "gradient_distance: got, exact")
    x = np.ravel(np.asarray(x))
    is_complex = np.issubdtype(x.dtype, np.complexfloating)
    return x.astype(np.complex128).view(np.float64) if is_complex else x.astype(np.float64)


def _of_group(group: list[_Leaf], leaves: list[_Leaf]) -> Fidelity:
    """Compares a group's gradients, or relative to its layer if the exact ones are rounding."""
    found = _fidelity(group, {})
    if found.error <= 0.5:
        return found
    path, layer = group[0].path, group
    while path and len(layer) == len(group):  # the layer is more than the group
        path = path[:-1]
        layer = [leaf for leaf in leaves if leaf.path[: len(path)] == path]
    largest = max(float(np.linalg.norm(leaf.exact)) for leaf in layer)
    got, exact = (np.concatenate(arrays) for arrays in list(zip(*group, strict=True))[1:])
    if not largest or np.linalg.norm(exact) > _ROUNDING * largest:
        return found
    error = float(np.linalg.norm(got - exact)) / largest
    return replace(found, error=error, is_rounding=True)


def _fidelity(leaves: list[_Leaf], groups: dict[str, Fidelity]) -> Fidelity:
    pairs = [(leaf.got, leaf.exact) for leaf in leaves]
    squares = np.sum([[g @ g, e @ e, g @ e, (g - e) @ (g - e)] for g, e in pairs], axis=0)
    if not squares.any():
        return Fidelity(0.0, 1.0, groups)
    got, exact, product, distance = (float(square) for square in squares)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = float(np.sqrt(np.divide(distance, exact)))
        cosine = float(np.divide(product, np.sqrt(got * exact)))
    return Fidelity(error, cosine, groups)
