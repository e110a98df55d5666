"""Decides to which part of training memory each argument of a step belongs.

This also finds work that XLA drops from a step because no result needs it.
"""

import functools
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jax.interpreters import partial_eval

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.lowering.step_arguments import StepError, argument_names
from lowmembp_jax.memory.scopes import is_backward, is_differentiated

Part = Literal[
    "parameters", "optimizer_state", "batch", "gradients", "intermediates", "temporaries", "outputs"
]

# JAX writes into an operation's name if it belongs to a differentiated loss or to the backward. If
# an argument reaches the loss and the backward changes it, it is trained. If the backward changes
# it and it never reaches the loss, it belongs to the optimizer.
Role = Literal["trained", "frozen", "optimizer_state"]

_ARGUMENT_PARTS = ("parameters", "optimizer_state", "batch", "gradients")
# These names decide anywhere in a path, whatever the program does with the array.
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
    shape: tuple[int, ...]  # on all devices together


def _first(words: list[str], patterns: tuple[tuple[re.Pattern[str], Part], ...]) -> Part | None:
    """The part that the outermost word with a match in `patterns` names."""
    return next((part for word in words for known, part in patterns if known.match(word)), None)


def _part(words: list[str], node: Any, role: Role | None, is_training: bool) -> Part:
    if isinstance(node, nnx.RngState):
        return "batch"
    if isinstance(node, nnx.OptState) or _is_optax(node):
        return "optimizer_state"
    if part := _first(words, _ANYWHERE):
        return part
    if role is not None:
        return role if role == "optimizer_state" else "parameters"
    if is_training:  # in a training step, "weight" without a role may be a batch's sample weight
        words = [words[0], *(word for word in words[1:] if not word.startswith("weight"))]
    part = _first(words, _PARTS) or "batch"
    if not is_variable(node):
        return part
    # An nnx.ModelAndOptimizer holds the model.
    is_held = part == "optimizer_state" and words[1:2] == ["model"]
    return "parameters" if part == "batch" or is_held else part


def _is_optax(node: Any) -> bool:
    """Whether the node is the state of a transformation of optax or of this library."""
    return type(node).__module__.split(".")[0] in ("optax", "lowmembp_jax")


def is_variable(node: Any) -> bool:
    """Whether the node is an NNX variable."""
    return isinstance(node, nnx.Variable)


def _given(parts: Any, args: tuple[Any, ...]) -> list[Part]:
    """The given part of each array."""
    try:
        given = jax.tree.leaves(jax.tree.broadcast(parts, args))
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise StepError(
            f"parts: expected a pytree prefix of the {len(args)} arguments, got {parts!r}: {reason}"
        ) from error
    for part in given:
        if part not in _ARGUMENT_PARTS:
            raise ValueError(f"parts: expected one of {', '.join(_ARGUMENT_PARTS)}, got {part!r}")
    return given


def arguments(
    step: Callable[..., Any], args: tuple[Any, ...], parts: Any, jaxpr: Any = None
) -> list[Argument]:
    """Lists the arrays in `args` with their parts, in the order of the program's parameters.

    Without `parts`, these rules decide, the first that applies:

    - The types of NNX's variables and of optax's states: random state is batch, and state of an
      optimizer is optimizer state.
    - A word "master...", "ema..." (parameters) or "grads" (gradients) anywhere in the path.
    - The program: it shows what is trained and what the optimizer carries, see `roles`.
    - The outermost known word of the path of argument, attributes and keys, such as
      `state.opt_state[0].mu['kernel']`. "params", "frozen", "batch_stats" and similar words mean
      parameters, "opt_state" and "optimizer" mean optimizer state.
    - Other NNX variables are parameters, and all other arrays are the batch.

    Args:
      step: the step, for the names of its arguments.
      args: its arguments.
      parts: a pytree prefix of `args` with the name of a part at each leaf, or None.
      jaxpr: the step's trace, whose inputs are the arrays, or None.

    Raises:
      ValueError: `parts` has an unknown name, or is not a prefix of `args`.
    """
    names = argument_names(step, len(args))
    given = None if parts is None else iter(_given(parts, args))
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
            told_part = _part(words, node, next(role), is_training)
            part = told_part if given is None else next(given)
            result.append(Argument(name, part, tuple(jax.numpy.shape(x))))
    return result


# An array's bits say what it is made of: the lowest is the backward, the others are the program's
# inputs. Results of the loss have no bits.
_BACKWARD = 1


class _Flow:
    """Follows which inputs reach a loss, and which inputs each output is made of outside of it."""

    def __init__(self, jaxpr: core.Jaxpr):
        self.in_loss = 0
        self.outputs = self._run(jaxpr, [2 << i for i in range(len(jaxpr.invars))])

    def _run(self, jaxpr: core.Jaxpr, inputs: Sequence[int]) -> list[int]:
        made = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            made.update(zip(equation.outvars, self._step(equation, made), strict=True))
        return [_of(made, out) for out in jaxpr.outvars]

    def _step(self, equation: Any, made: dict[Any, int]) -> list[int]:
        stack = str(equation.source_info.name_stack)
        count = len(equation.outvars)
        if is_backward(stack):
            return [_BACKWARD] * count
        if is_differentiated(stack):
            self.in_loss |= _union(_of(made, atom) for atom in equation.invars)
            return [0] * count
        bodies = jaxprs.bodies(equation)
        if not bodies:
            return [_union(_of(made, atom) for atom in equation.invars)] * count
        operands = [_of(made, atom) for atom in jaxprs.operands(equation)]
        back = jaxprs.carried(equation, bodies[0])
        while True:
            results = [self._run(body, operands) for body in bodies]
            results = [_union(bits) for bits in zip(*results, strict=True)]
            carried = [
                bits | (0 if out is None else results[out])
                for bits, out in zip(operands, back, strict=True)
            ]
            if carried == operands:
                return results
            operands = carried


def _of(made: dict[Any, int], operand: Any) -> int:
    return 0 if isinstance(operand, core.Literal) else made.get(operand, 0)


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _like(var: Any) -> tuple[Any, ...]:
    return tuple(var.aval.shape), var.aval.dtype


def roles(jaxpr: Any) -> list[Role | None]:
    """Finds the role of each input of a training step, or None if the program does not show it.

    - "trained": the input reaches the loss, and the step returns it in the same shape, changed by
      the backward. Inputs of the loss whose gradient is returned, or that are made again from
      master weights, are trained, too.
    - "frozen": the input is floating, reaches the loss and is returned unchanged.
    - "optimizer_state": the step returns the input in the same shape, changed by the backward, and
      the input does not reach the loss.

    Returns:
      A role for each input. All are None if the program trains nothing.
    """
    flow = _Flow(jaxpr)
    returned: dict[Any, int] = {}
    gradients: Counter[Any] = Counter()  # includes parameters that are made of master weights
    for var, bits in zip(jaxpr.outvars, flow.outputs, strict=True):
        inputs = [i for i in range(len(jaxpr.invars)) if bits >> i + 1 & 1]
        own = [i for i in inputs if _like(var) == _like(jaxpr.invars[i])]
        for i in own:
            returned[i] = returned.get(i, 0) | bits
        if bits & _BACKWARD and not own:
            gradients[_like(var)] += 1
    found: list[Role | None] = []
    is_trained = False
    for i, var in enumerate(jaxpr.invars):
        in_loss, bits = flow.in_loss >> i + 1 & 1, returned.get(i, 0)
        role: Role | None = None
        if bits & _BACKWARD:
            role = "trained" if in_loss else "optimizer_state"
        elif in_loss and not bits and gradients[_like(var)]:
            gradients[_like(var)] -= 1
            role = "trained"
        elif bits and in_loss and var.aval.shape and jnp.issubdtype(var.aval.dtype, jnp.floating):
            role = "frozen"
        is_trained |= role == "trained"
        found.append(role)
    return found if is_trained else [None] * len(found)


def has_backward(jaxpr: Any) -> bool:
    """Whether a trace, or a function that it calls, holds operations of a backward pass."""
    return any(
        is_backward(str(equation.source_info.name_stack))
        or any(map(has_backward, jaxprs.bodies(equation)))
        for equation in jaxpr.eqns
    )


def without_unused(jaxpr: Any) -> Any:
    """Returns the trace without the operations that no output needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def warn_of_lost_work(jaxpr: Any, arguments: Iterable[Argument]) -> None:
    """Warns if the planned step does less than real training."""
    if not has_backward(jaxpr):  # an evaluation step
        return
    has_parameters = any(argument.part == "parameters" for argument in arguments)
    is_dropped = not has_backward(without_unused(jaxpr))
    if is_dropped or (has_parameters and not any(roles(jaxpr))):
        what = (
            "it computes gradients but returns neither gradients nor new parameters, so XLA drops "
            "the work that only they need: return the new parameters"
        )
    elif not has_parameters:
        what = (
            "expected a parameter among its arguments, got none: name one `params`, or pass `parts`"
        )
    else:
        return
    warnings.warn(f"plan: step: {what}", UserWarning, stacklevel=4)
