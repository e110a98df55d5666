"""Finds the equation that made a residual, in nested jaxprs."""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from lowmembp_jax._jax_internals import checkpoint_name_of
from lowmembp_jax.compression import jaxprs

# The results have the same bytes as the operand. Under lax.scan, XLA stacks them separately
# (compiled for an H200, JAX 0.12.0).
_SAME_BYTES = frozenset((
    "copy", "expand_dims", "optimization_barrier", "pvary", "reduce_precision", "reshape",
    "sharding_constraint", "squeeze",
))  # fmt: skip


class _Body(NamedTuple):
    """A jaxpr and the equations that call it, outermost first."""

    jaxpr: Any
    calls: tuple[Any, ...] = ()
    outer: Any = None  # the body that holds the last of these equations


class Origin(NamedTuple):
    """The origin of a residual.

    The equations end with the one that makes it, after those that call it, outermost first. A
    literal, and an input or a constant of the outermost jaxpr, have no equations.
    """

    key: tuple  # equal for residuals that are one array in memory
    times: tuple[int, ...]  # lengths of the scans that stack it, outermost first
    equations: tuple[Any, ...]
    input: int | None  # position in the outermost jaxpr's inputs, if it is one
    name: str  # its `checkpoint_name`, or ""


class Origins:
    """Finds the origins of the variables of one jaxpr."""

    def __init__(self, jaxpr):
        self._root = _Body(jaxpr)
        self._made: dict[int, dict] = {}

    def _maker(self, body: _Body, var: Any) -> tuple[Any, int]:
        """The equation that makes a variable and the position of the result; (None, 0) if none."""
        if id(body.jaxpr) not in self._made:
            self._made[id(body.jaxpr)] = {
                out: (equation, index)
                for equation in body.jaxpr.eqns
                for index, out in enumerate(equation.outvars)
            }
        return self._made[id(body.jaxpr)].get(var, (None, 0))

    def of(self, var: Any) -> Origin:
        """Finds the origin of a variable or a literal of the outermost jaxpr."""
        body, times, name, made = self._root, (), "", None
        while not isinstance(var, Literal):
            made, index = self._maker(body, var)
            if made is None:
                # The input of a scan's or a cond's jaxpr is another array.
                in_call = body.calls and body.calls[-1].primitive.name not in ("scan", "cond")
                if not in_call or var not in body.jaxpr.invars:
                    break
                var = jaxprs.operands(body.calls[-1])[body.jaxpr.invars.index(var)]
                body = body.outer
                continue
            kind, inner = made.primitive.name, jaxprs.bodies(made)
            in_scan = any(call.primitive.name == "scan" for call in body.calls)
            if (given := checkpoint_name_of(made)) or (kind in _SAME_BYTES and not in_scan):
                name = name or given or ""
                var = made.invars[index]
                continue
            if not inner or kind == "cond":
                break
            if kind == "scan":
                if index in jaxprs.carried(made, inner[0]):
                    break
                times += (made.params["length"],)
            body = _Body(inner[0], (*body.calls, made), body)
            var = inner[0].outvars[index]
        key = (*map(id, body.calls), id(var))
        # Name the operation whose result is reshaped, moved or the like.
        made = None if isinstance(var, Literal) else made
        while made is not None and made.primitive.name in (*_SAME_BYTES, "device_put", "name"):
            name = name or checkpoint_name_of(made) or ""
            operand = made.invars[0]
            before = None if isinstance(operand, Literal) else self._maker(body, operand)[0]
            if before is None:
                break
            made = before
        inputs = self._root.jaxpr.invars
        is_input = not body.calls and not isinstance(var, Literal) and var in inputs
        return Origin(
            key=key,
            times=times,
            equations=body.calls if made is None else (*body.calls, made),
            input=inputs.index(var) if is_input else None,
            name=name,
        )
