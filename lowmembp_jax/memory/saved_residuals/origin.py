"""From a residual to the equation that made it and to those that read it, through nested jaxprs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal

from lowmembp_jax.compression import jaxprs

# The same bytes as the operand's. Under lax.scan only "name" still is the same array to XLA: the
# others are stacked beside their operand (compiled for an H200, JAX 0.12.0).
_SAME_BYTES = frozenset(
    (
        "copy",
        "expand_dims",
        "name",
        "optimization_barrier",
        "pvary",
        "reduce_precision",
        "reshape",
        "sharding_constraint",
        "squeeze",
    )
)


class Body(NamedTuple):
    """A jaxpr and the equations that call it, outermost first."""

    jaxpr: Any
    calls: tuple[Any, ...] = ()
    outer: "Body | None" = None


class Origin(NamedTuple):
    """Where a residual comes from.

    Attributes:
      key: equal for residuals that are one array in memory.
      times: lengths of the scans that stack it, outermost first.
      equations: what makes it, behind the equations that call that, outermost first. Empty for a
        literal and for an input or a constant of the outermost jaxpr.
      input: position in the outermost jaxpr's inputs of an input that this is, or is a cast of.
      cast: it is a cast of an input or a constant.
      name: its `checkpoint_name`, or "".
    """

    key: tuple
    times: tuple[int, ...]
    equations: tuple[Any, ...]
    input: int | None
    cast: bool
    name: str


class _Place(NamedTuple):
    body: Body
    var: Any

    @property
    def key(self) -> tuple:
        return (*map(id, self.body.calls), id(self.var))


class Equations:
    """Makers and readers of the variables of one jaxpr."""

    def __init__(self, jaxpr):
        self._root = Body(jaxpr)
        self._made: dict[int, dict] = {}
        self._read: dict[int, dict] = {}

    def _maker(self, place: _Place) -> tuple[Any, int] | None:
        jaxpr = place.body.jaxpr
        if id(jaxpr) not in self._made:
            self._made[id(jaxpr)] = {
                out: (equation, index)
                for equation in jaxpr.eqns
                for index, out in enumerate(equation.outvars)
            }
        return self._made[id(jaxpr)].get(place.var)

    def _operand(self, place: _Place, strict: bool) -> _Place | None:
        """What an input of a jaxpr is at the equation that calls it."""
        body, var = place
        if body.outer is None or var not in body.jaxpr.invars:
            return None
        call, index = body.calls[-1], body.jaxpr.invars.index(var)
        if strict and call.primitive.name in ("scan", "cond"):
            return None
        if (carry := jaxprs.carried(call, body.jaxpr)[index]) is not None:
            return _Place(body, body.jaxpr.outvars[carry])
        return _Place(body.outer, jaxprs.operands(call)[index])

    def _before(self, place: _Place, strict: bool) -> tuple[_Place, int | None] | None:
        """One step towards the origin, and the length of a scan that is entered.

        Strict steps stay at one array in memory. Others follow it through reshapes, loop
        carries and branches, to where a reader would look.
        """
        if isinstance(place.var, Literal):
            return None
        if (made := self._maker(place)) is None:
            up = self._operand(place, strict)
            return None if up is None else (up, None)
        body, (equation, index) = place.body, made
        kind = equation.primitive.name
        if kind in _SAME_BYTES or (kind == "device_put" and not strict):
            stacked = any(call.primitive.name == "scan" for call in body.calls)
            if strict and stacked and kind != "name":
                return None
            return _Place(body, equation.invars[index]), None
        inner = [
            _Place(Body(jaxpr, (*body.calls, equation), body), jaxpr.outvars[index])
            for jaxpr in jaxprs.bodies(equation)
        ]
        if not inner:
            return None
        if kind == "scan" and index not in jaxprs.carried(equation, inner[0].body.jaxpr):
            return inner[0], equation.params["length"]
        if strict and kind in ("scan", "cond"):
            return None
        # Branches that have not this residual fill in zeros.
        return max(inner, key=self._is_computed) if kind == "cond" else inner[0], None

    def _is_computed(self, place: _Place) -> bool:
        made = None if isinstance(place.var, Literal) else self._maker(place)
        return made is not None and made[0].primitive.name != "broadcast_in_dim"

    def _follow(self, place: _Place, strict: bool) -> tuple[_Place, tuple[int, ...], str]:
        times, name, seen = (), "", {place.key}
        while (before := self._before(place, strict)) is not None:
            if not isinstance(place.var, Literal) and (made := self._maker(place)):
                name = name or (made[0].params["name"] if made[0].primitive.name == "name" else "")
            place, length = before
            times += () if length is None else (length,)
            if place.key in seen:  # a carry that no iteration changes
                break
            seen.add(place.key)
        return place, times, name

    def origin(self, var) -> Origin:
        """The origin of a variable or a literal of the outermost jaxpr."""
        array, times, name = self._follow(_Place(self._root, var), strict=True)
        place, _, later = self._follow(array, strict=False)
        made = None if isinstance(place.var, Literal) else self._maker(place)
        source, cast = place, False
        if made and made[0].primitive.name == "convert_element_type":
            source, _, _ = self._follow(_Place(place.body, made[0].invars[0]), strict=False)
            cast = isinstance(source.var, Literal) or self._maker(source) is None
        inputs = self._root.jaxpr.invars
        known = source.body.outer is None and not isinstance(source.var, Literal)
        # Stacked copies of an input are made by the scan that stacks them.
        equations = (*place.body.calls, made[0]) if made else array.body.calls
        return Origin(
            key=array.key,
            times=times,
            equations=equations,
            input=inputs.index(source.var) if known and source.var in inputs else None,
            cast=cast,
            name=name or later,
        )

    def readers(self, var) -> Iterator[tuple[Any, ...]]:
        """The equations that read a variable, each behind those that call it."""
        return self._readers(self._root, var)

    def _readers(self, body: Body, var) -> Iterator[tuple[Any, ...]]:
        if id(body.jaxpr) not in self._read:
            read = self._read[id(body.jaxpr)] = {}
            for equation in body.jaxpr.eqns:
                # The index of a cond gets -1, because no branch reads it.
                first = len(jaxprs.operands(equation)) - len(equation.invars)
                for index, operand in enumerate(equation.invars, first):
                    if not isinstance(operand, Literal):
                        read.setdefault(operand, []).append((equation, index))
        for equation, index in self._read[id(body.jaxpr)].get(var, ()):
            calls = (*body.calls, equation)
            inner = jaxprs.bodies(equation) if index >= 0 else []
            if not inner:
                yield calls
            for jaxpr in inner:
                yield from self._readers(Body(jaxpr, calls, body), jaxpr.invars[index])
