"""Which part of training memory each argument of a training step is."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from lowmembp_jax.memory.buffers.parts import Part

_ARGUMENT_PARTS = ("parameters", "optimizer_state", "batch", "gradients")
_MASTER = re.compile(r"master")
_PARTS: tuple[tuple[re.Pattern[str], Part], ...] = (
    (re.compile(r"opt$|opt(im(izer)?)?_?states?$|optim(izer)?$"), "optimizer_state"),
    (re.compile(r"grad(ient)?s?$"), "gradients"),
    (
        re.compile(
            r"(\w+_)?(params?|parameters?|weights?|variables)$|model$|frozen$|trained$|trainable$"
            r"|lora\w*$|base$|ema\w*$|batch_stats$"
        ),
        "parameters",
    ),
)


class Argument(NamedTuple):
    """An array among the arguments of a step."""

    name: str  # such as "state.params['layer_0']['kernel']"
    part: Part
    shape: tuple[int, ...]  # whole, on all devices


def argument_names(step: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional arguments; "args[2]" where there is none."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def _part_by_name(words: list[str]) -> Part:
    if any(map(_MASTER.match, words)):
        return "parameters"
    for word in words:
        for pattern, part in _PARTS:
            if pattern.match(word):
                return part
    return "batch"


def _part(words: list[str], node: Any) -> Part:
    if isinstance(node, nnx.OptState):
        return "optimizer_state"
    if isinstance(node, nnx.RngState):
        return "batch"
    part = _part_by_name(words)
    if not _is_variable(node):
        return part
    # An nnx.ModelAndOptimizer holds the model.
    is_held = part == "optimizer_state" and words[1:2] == ["model"]
    return "parameters" if part == "batch" or is_held else part


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _checked(part: Any) -> Part:
    if part not in _ARGUMENT_PARTS:
        raise ValueError(f"parts has {part!r}: accepted are {', '.join(_ARGUMENT_PARTS)}")
    return part


def _broadcast(parts: Any, args: tuple[Any, ...]) -> list[Any]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(parts, args))
    except ValueError as error:
        raise ValueError(
            f"parts={parts!r} is no pytree prefix of the {len(args)} arguments: {error}"
        ) from error


def arguments(step: Callable[..., Any], args: tuple[Any, ...], parts: Any) -> list[Argument]:
    """The arrays among `args`, in the order of the compiled program's parameters.

    Without `parts`, an array belongs to the part that the outermost telling word of its path
    names: argument, attributes and keys, such as `state.opt_state[0].mu['kernel']`. "params",
    "weights", "frozen", "batch_stats" and the like are parameters, "opt_state" and "optimizer"
    optimizer state, "grads" gradients; what is called "master..." are parameters anywhere. The
    rest is the batch. An optimizer's variables in an `nnx.State` are optimizer state, random
    numbers batch, and other variables, of which no name tells, parameters.

    Args:
      step: whose argument names count.
      args: its arguments.
      parts: a pytree prefix of `args` with the name of a part each, or None.

    Raises:
      ValueError: `parts` has another name, or is no prefix of `args`.
    """
    names = argument_names(step, len(args))
    given = None if parts is None else iter(_broadcast(parts, args))
    result = []
    for path, node in jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_variable):
        name = names[path[0].idx] + jax.tree_util.keystr(path[1:])
        words = re.findall(r"[A-Za-z_]\w*", name)
        for x in jax.tree.leaves(node):
            part = _part(words, node) if given is None else _checked(next(given))
            result.append(Argument(name, part, tuple(jax.numpy.shape(x))))
    return result
