"""Finds out from a training step which arguments it trains and which the optimizer carries.

JAX writes into an operation's name if it belongs to a differentiated loss or to the backward. If
an argument reaches the loss and the backward changes it, it is trained.
If the backward changes it and it never reaches the loss, it belongs to the optimizer.
"""

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend import core

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.scopes import is_backward, is_differentiated

Role = Literal["trained", "frozen", "optimizer_state"]

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
