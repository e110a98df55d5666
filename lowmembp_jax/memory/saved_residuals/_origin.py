"""Finds the equation that made a residual and the equations that read it, in nested jaxprs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal

from lowmembp_jax.compression import jaxprs

# The results have the same bytes as the operand. Under lax.scan, XLA shares only the array of
# "name" and stacks the others separately (compiled for an H200, JAX 0.12.0).
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
    """The origin of a residual.

    Attributes:
      key: equal for residuals that are one array in memory.
      times: lengths of the scans that stack it, outermost first.
      equations: the equation that makes it, after the equations that call it, outermost first.
        Empty for a literal, and for an input or a constant of the outermost jaxpr.
      input: position in the outermost jaxpr's inputs, if the residual is an input or a cast of one.
      cast: whether it is a cast of an input or a constant.
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
    """Finds makers and readers of the variables of one jaxpr."""

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
        """The operand of the calling equation that becomes an input of a jaxpr."""
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
        """Takes one step towards the origin, and returns the length of a scan that it enters.

        Strict steps stay at the same array in memory. Other steps continue through reshapes, loop
        carries and branches, to the code that a reader would look for.
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
        # Branches without this residual return zeros instead.
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
            if place.key in seen:  # no iteration changes this carry
                break
            seen.add(place.key)
        return place, times, name

    def origin(self, var) -> Origin:
        """Finds the origin of a variable or a literal of the outermost jaxpr."""
        array, times, name = self._follow(_Place(self._root, var), strict=True)
        place, _, later = self._follow(array, strict=False)
        made = None if isinstance(place.var, Literal) else self._maker(place)
        source, cast = place, False
        if made and made[0].primitive.name == "convert_element_type":
            source, _, _ = self._follow(_Place(place.body, made[0].invars[0]), strict=False)
            cast = isinstance(source.var, Literal) or self._maker(source) is None
        inputs = self._root.jaxpr.invars
        known = source.body.outer is None and not isinstance(source.var, Literal)
        # A scan that stacks copies of an input makes these copies.
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
        """Yields the equations that read a variable, each after the equations that call it."""
        return self._readers(self._root, var)

    def _readers(self, body: Body, var) -> Iterator[tuple[Any, ...]]:
        if id(body.jaxpr) not in self._read:
            read = self._read[id(body.jaxpr)] = {}
            for equation in body.jaxpr.eqns:
                # The index operand of a cond gets -1, because no branch reads it.
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
