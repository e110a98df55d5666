"""Which part of training memory each argument of a training step is."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from lowmembp_jax.memory.classification.parts import Part
from lowmembp_jax.memory.classification.roles import Role, roles
from lowmembp_jax.memory.lowering.step_arguments import StepError

_ARGUMENT_PARTS = ("parameters", "optimizer_state", "batch", "gradients")
# Wherever it stands, and whatever the program does with it.
_ANYWHERE: tuple[tuple[re.Pattern[str], Part], ...] = (
    (re.compile(r"master|ema(_|$)"), "parameters"),
    (re.compile(r"grad(ient)?s?$"), "gradients"),
)
_PARTS: tuple[tuple[re.Pattern[str], Part], ...] = (
    (re.compile(r"(\w+_)?batch(es)?$|inputs?$|examples?$|data$"), "batch"),
    (re.compile(r"opt$|opt(im(izer)?)?_?states?$|optim(izer)?$"), "optimizer_state"),
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
    is_trained: bool = False  # the program returns it changed by its gradient, or the gradient


def argument_names(step: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional arguments; "args[2]" where there is none."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def _first(words: list[str], patterns: tuple[tuple[re.Pattern[str], Part], ...]) -> Part | None:
    """What the outermost word says that matches one of `patterns`."""
    for word in words:
        for pattern, part in patterns:
            if pattern.match(word):
                return part
    return None


def _part(words: list[str], node: Any, role: Role | None, is_training: bool) -> Part:
    if isinstance(node, nnx.RngState):
        return "batch"
    if isinstance(node, nnx.OptState) or _is_optax(node):
        return "optimizer_state"
    if part := _first(words, _ANYWHERE):
        return part
    if role is not None:
        return role if role == "optimizer_state" else "parameters"
    if is_training:  # of a batch that holds weights, and does not come back
        words = [words[0], *(word for word in words[1:] if not word.startswith("weight"))]
    part = _first(words, _PARTS) or "batch"
    if not is_variable(node):
        return part
    # An nnx.ModelAndOptimizer holds the model.
    is_held = part == "optimizer_state" and words[1:2] == ["model"]
    return "parameters" if part == "batch" or is_held else part


def _is_optax(node: Any) -> bool:
    """Whether it is a state of one of optax's transformations, or of this library's."""
    return type(node).__module__.split(".")[0] in ("optax", "lowmembp_jax")


def is_variable(node: Any) -> bool:
    """Whether it is one of NNX's variables."""
    return isinstance(node, nnx.Variable)


def _checked(part: Any) -> Part:
    if part not in _ARGUMENT_PARTS:
        raise ValueError(f"parts has {part!r}: accepted are {', '.join(_ARGUMENT_PARTS)}")
    return part


def _broadcast(parts: Any, args: tuple[Any, ...]) -> list[Any]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(parts, args))
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise StepError(
            f"parts={parts!r} is no pytree prefix of the {len(args)} arguments: {reason}"
        ) from error


def arguments(
    step: Callable[..., Any], args: tuple[Any, ...], parts: Any, jaxpr: Any = None
) -> list[Argument]:
    """The arrays among `args`, in the order of the compiled program's parameters.

    Without `parts`, the program tells what is trained and what the optimizer carries, see `roles`,
    and the types of optax's states and NNX's variables do. For the rest, an array belongs to
    the part that the outermost telling word of its path names: argument, attributes and keys,
    such as `state.opt_state[0].mu['kernel']`. "params", "frozen", "batch_stats" and the like are
    parameters, "opt_state" and "optimizer" optimizer state, "grads" gradients. What is called
    "master..." or "ema..." is parameters, and "grads" gradients, anywhere. The rest is the batch.
    Of NNX's variables those of an optimizer are optimizer state, random numbers batch, and
    others, of which no name tells, parameters.

    Args:
      step: whose argument names count.
      args: its arguments.
      parts: a pytree prefix of `args` with the name of a part each, or None.
      jaxpr: of the step, whose inputs are the arrays; None where there is no trace.

    Raises:
      ValueError: `parts` has another name, or is no prefix of `args`.
    """
    names = argument_names(step, len(args))
    given = None if parts is None else iter(_broadcast(parts, args))
    told = [None] * len(jax.tree.leaves(args)) if jaxpr is None else roles(jaxpr)
    role, is_training = iter(told), any(told)
    result = []
    whole = jax.tree_util.tree_leaves_with_path(
        args, is_leaf=lambda x: is_variable(x) or _is_optax(x)
    )
    for path, node in whole:
        for inside, x in jax.tree_util.tree_leaves_with_path(node):
            inside = () if is_variable(node) else inside
            name = names[path[0].idx] + jax.tree_util.keystr((*path[1:], *inside))
            words = re.findall(r"[A-Za-z_]\w*", name)
            own_role = next(role)
            told_part = _part(words, node, own_role, is_training)
            part = told_part if given is None else _checked(next(given))
            trains = own_role == "trained" and part == "parameters"
            result.append(Argument(name, part, tuple(jax.numpy.shape(x)), trains))
    return result
