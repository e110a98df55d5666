"""Finds the differences of a jaxpr that may be small beside the rounding errors of their operands.

If x and y are rounded and nearly equal, such as the coordinates of two atoms far from the origin,
x - y has no correct digit. So the backward never computes such a difference again from rounded
numbers. It is stored, which is as right as to store a product, or its sources are stored unrounded,
if that takes fewer bytes. These differences do not cancel in this way:

- x - max(x) of a softmax has the errors of x. exp(x - max(x)) is stored if x is at hand.
- x - mean(x), because x is then stored without its mean, as for a norm.
- x * cos - y * sin of a rotation, beside y * cos + x * sin: not both can cancel, because the sum of
  their squares is (x^2 + y^2) (cos^2 + sin^2).
- Bounded functions of one array, such as 1 - sigmoid(x), whose errors are as small as its bounds.
- Sums, such as a residual stream.
- x - c of a constant c, unless x is in memory, or is computed from such arrays without a product.
  If an array of constants takes part, it may be a mask, so the sources are stored unrounded.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend import core

from lowmembp_jax._arguments import is_inexact
from lowmembp_jax._jax_internals import operation
from lowmembp_jax._sizes import array_bytes
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression._needs import EXACT, Need
from lowmembp_jax.compression._origins import Origins
from lowmembp_jax.compression._scaled_float8 import Rows
from lowmembp_jax.compression.facts import Fact, Facts, fact_of

_PARTS = frozenset(("dynamic_slice", "gather", "slice", "split"))


class Differences:
    """The differences of one jaxpr.

    Args:
      jaxpr: the jaxpr.
      origins: where its variables come from.
      facts: the facts about the variables.
      needs: how the backward needs them, as far as that is known.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        origins: Origins,
        facts: Facts,
        needs: Mapping[Any, Need],
    ):
        self.jaxpr, self.origins, self.facts, self.needs = jaxpr, origins, facts, needs
        self.instead = dict[Any, int]()  # the bytes that are stored instead of a source

    def has(self, eqn: Any, read: list[Fact]) -> bool:
        """Whether an equation is such a difference, perhaps of an array and its mean."""
        if operation(eqn) not in ("sub", "add") or not is_inexact(eqn.outvars[0].aval):
            return False
        if operation(eqn) == "add" and not any(map(self._is_negative, eqn.invars)):
            return False
        lossy = [i for i, fact in enumerate(read) if fact.lossy]
        if not lossy or self.facts.of[eqn.outvars[0]].shifted is not None:
            return False
        if len(lossy) == 1:
            [i] = lossy
            is_zero = read[1 - i].bounds == (0, 0)
            is_bounded = all(map(math.isfinite, read[i].bounds))
            return self._is_kept(eqn.invars[i]) and not is_zero and not is_bounded
        return not self._is_rotation(eqn)

    def rows_of_mean(self, eqn: Any, read: list[Fact]) -> tuple[Any, Rows | None]:
        """The operand whose mean the other one is, and its rows, if it is stored by these rows."""
        if not read or not all(fact.lossy for fact in read):
            return None, None
        for atom, other in (eqn.invars, eqn.invars[::-1]):
            rows = self._rows_of_sum(other, atom)
            if rows and math.prod(rows.shape) == atom.aval.size and self._may_be_by(rows, atom):
                return atom, rows
        return None, None

    def are_less_than_sources(self, eqn: Any, size: int) -> bool:
        """Whether an equation's results of so many bytes take fewer than its sources unrounded.

        They are not stored beside a constant. Results of other equations count, too, if they are
        stored instead of the same sources.
        """
        if self._has_constants(eqn):
            return False
        todo, sources, seen = list[Any](jaxprs.variables(eqn)), list[Any](), set[Any]()
        while todo:
            atom = todo.pop()
            fact, need = fact_of(self.facts.of, atom), self.needs.get(atom, Need())
            if atom in seen or not fact.lossy or fact.exact or need.level == EXACT:
                continue
            seen.add(atom)
            if self.origins.is_source(atom):
                sources.append(atom)
            elif self._has_constants(self.origins.maker(atom)):
                return False
            else:
                todo += jaxprs.variables(self.origins.maker(atom))
        before = sum(self.instead.get(v, 0) for v in sources)
        exact = sum(array_bytes(v.aval.shape, v.aval.dtype) for v in sources)
        if not size or before + size >= exact:
            return False
        self.instead |= {v: self.instead.get(v, 0) + size for v in sources}
        return True

    def _is_kept(self, atom: Any) -> bool:
        """Whether an array is in memory, or is computed from such arrays without a product."""
        todo, seen = [atom], set[Any]()
        while todo:
            atom = self.origins.origin(todo.pop())
            eqn = self.origins.maker(atom)
            # A call is not looked into: anything may happen there.
            if eqn is None or atom in seen or self.origins.made[atom] in self.facts.inside:
                continue
            seen.add(atom)
            if self.origins.is_source(atom):
                if not fact_of(self.facts.of, atom).at_hand:
                    return False
                continue
            if rules.rule(eqn).product:
                return False
            read = [v for v in jaxprs.variables(eqn) if is_inexact(v.aval)]
            todo += [v for v in read if fact_of(self.facts.of, v).lossy]
        return True

    def _has_constants(self, eqn: Any) -> bool:
        """Whether one operand has rounding errors, and the other is an array that is not trained.

        It may be a mask of 0 and 1e9. Beside 1e9 the other numbers of a row would be lost.
        """
        read = [(atom, fact_of(self.facts.of, atom)) for atom in eqn.invars]
        others = [a for a, fact in read if is_inexact(a.aval) and not (fact.lossy or fact.varied)]
        if operation(eqn) != "select_n":  # which may choose a number here and there
            others = [a for a in others if self.origins.origin(a).aval.size > 1]
        return bool(others) and any(fact.lossy for _, fact in read)

    def _is_negative(self, atom: Any) -> bool:
        """Whether an operand is a negative number, or is computed as the negative of an array."""
        atom = self.origins.origin(atom)
        if isinstance(atom, core.Literal):
            return bool(np.all(np.real(atom.val) < 0))
        eqn = self.origins.maker(atom)
        if eqn is None or operation(eqn) not in ("mul", "div", "neg"):
            return False
        signs = [self._is_negative(a) for a in eqn.invars]
        return signs.count(True) % 2 == (operation(eqn) != "neg")

    def _is_rotation(self, eqn: Any) -> bool:
        """Whether x c - y s is computed beside y c + x s, where c and s have no rounding errors."""
        terms = self._products(eqn)
        if len(terms) < 2:
            return False
        [(x, c), (y, s)] = terms
        turned = (y, c, x, s)
        return any(all(map(self._are_same, turned, (*a, *b))) for a, b in self._sums)

    @functools.cached_property
    def _sums(self) -> list[Any]:
        """The factors of each sum of two products, in both orders."""
        sums = (self._products(eqn) for eqn in self.jaxpr.eqns if operation(eqn) == "add")
        return [order for pair in sums if len(pair) == 2 for order in (pair, pair[::-1])]

    def _products(self, eqn: Any) -> list[tuple[Any, Any]]:
        """The factors of those operands that are products of a lossy array and another one."""
        found = []
        for term in map(self.origins.maker, map(self.origins.origin, eqn.invars)):
            if term is not None and operation(term) == "mul":
                x, y = sorted(term.invars, key=lambda v: not fact_of(self.facts.of, v).lossy)
                if fact_of(self.facts.of, x).lossy and not fact_of(self.facts.of, y).lossy:
                    found.append((x, y))
        return found

    def _are_same(self, a: Any, b: Any) -> bool:
        """Whether arrays are computed by the same equations."""
        todo, seen = [(a, b)], set[tuple[Any, Any]]()
        while todo:
            a, b = map(self.origins.origin, todo.pop())
            one, other = self.origins.maker(a), self.origins.maker(b)
            if isinstance(a, core.Literal) and isinstance(b, core.Literal):
                if not np.array_equal(a.val, b.val):
                    return False
            elif a is not b:
                if one is None or other is None:
                    return False
                if (a, b) in seen:
                    continue
                is_known = rules.rule(one).elementwise or operation(one) in (*_PARTS, "iota")
                is_equal = (one.primitive, one.params) == (other.primitive, other.params)
                if not is_known or not is_equal or _place(one, a) != _place(other, b):
                    return False
                seen.add((a, b))
                todo += zip(one.invars, other.invars, strict=True)
        return True

    def _rows_of_sum(self, atom: Any, of: Any) -> Rows | None:
        """The rows of `of` over which an array is a sum, perhaps times a number."""
        while (eqn := self.origins.maker(atom)) is not None:
            if rules.rule(eqn).reduces:
                return Rows(eqn.invars[0].aval.shape, tuple(eqn.params["axes"]))
            lossy = [v for v in jaxprs.variables(eqn) if fact_of(self.facts.of, v).lossy]
            if len(lossy) != 1:
                return None
            [atom] = lossy
        if not fact_of(self.facts.of, atom).reduced or atom.aval.ndim != of.aval.ndim:
            return None
        axes = (i for i, size in enumerate(atom.aval.shape) if size < of.aval.shape[i])
        return Rows(of.aval.shape, tuple(axes))

    def _may_be_by(self, rows: Rows, atom: Any) -> bool:
        """Whether an array, or those that it is elementwise computed from, can be stored by rows.

        Products are computed from other arrays, whose rounding errors are in proportion.
        """
        if self.needs.get(atom, Need()).rows not in (None, rows):
            return False
        todo, seen = [atom], set[Any]()
        while todo:
            atom = todo.pop()
            if (
                atom in seen
                or self.origins.is_source(atom)
                or self.origins.made[atom] in self.facts.inside
            ):
                continue
            seen.add(atom)
            eqn = self.origins.maker(atom)
            rule = rules.rule(eqn)
            if rule.elementwise or rule.passes:
                todo += [v for v in jaxprs.variables(eqn) if fact_of(self.facts.of, v).lossy]
            elif not rule.product:
                return False
        return True


def _place(eqn: Any, result: Any) -> int:
    return next(i for i, var in enumerate(eqn.outvars) if var is result)
