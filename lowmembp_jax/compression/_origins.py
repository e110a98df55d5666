"""From which equations and arrays the variables of a jaxpr come."""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from lowmembp_jax._jax_internals import checkpoint_name_of, operation
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression.facts import Facts, fact_of


class Origins:
    """The origins of the variables of one jaxpr.

    Attributes:
      made: the number of the equation that makes each variable.
      readers: how many equations read each variable.
    """

    def __init__(self, jaxpr: core.Jaxpr, facts: Facts):
        self.jaxpr, self.facts = jaxpr, facts
        self.made, self.readers = dict[Any, int](), dict[Any, int]()
        for number, eqn in enumerate(jaxpr.eqns):
            self.made |= dict.fromkeys(eqn.outvars, number)
            for var in set(jaxprs.variables(eqn)):
                self.readers[var] = self.readers.get(var, 0) + 1

    def maker(self, atom: Any) -> Any:
        """The equation that makes a variable; None for inputs and literals."""
        is_made = isinstance(atom, core.Var) and atom in self.made
        return self.jaxpr.eqns[self.made[atom]] if is_made else None

    def back(self, atom: Any) -> Iterator[tuple[Any, core.JaxprEqn]]:
        """Yields a variable and its maker, and those before it up to one that computes numbers."""
        while (eqn := self.maker(atom)) is not None:
            yield atom, eqn
            if not rules.rule(eqn).passes:
                return
            atom = eqn.invars[0]

    def origin(self, atom: Any, through: frozenset[str] = frozenset()) -> Any:
        """The array that is passed on as `atom`, perhaps by operations `through`, not negated."""
        while (eqn := self.maker(atom)) is not None:
            if operation(eqn) == "neg" or not (rules.rule(eqn).passes or operation(eqn) in through):
                break
            atom = eqn.invars[0]
        return atom

    def is_source(self, atom: Any) -> bool:
        """Whether an array is not computed again if the backward needs it exactly."""
        eqn = self.maker(atom)
        if eqn is None or self.made[atom] in self.facts.saved or rules.rule(eqn).reduces:
            return True
        return eqn.primitive.name in ("scan", "shard_map")

    def follows(self, atom: Any, others: Iterable[Any]) -> bool:
        """Whether an array is computed, not only element by element, from a lossy one of others."""
        lossy = {v for v in others if v is not atom and fact_of(self.facts.of, v).lossy}
        first = min((self.made.get(v, -1) for v in lossy), default=len(self.jaxpr.eqns))
        todo, seen = [(atom, False)], set[Any]()
        while todo:
            atom, is_computed = step = todo.pop()
            if is_computed and atom in lossy:
                return True
            eqn = self.maker(atom)
            if eqn is None or step in seen or self.made[atom] <= first:
                continue
            seen.add(step)
            is_computed |= not (rules.rule(eqn).elementwise or rules.rule(eqn).passes)
            if not rules.rule(eqn).again:
                todo += [(v, is_computed) for v in jaxprs.variables(eqn)]
        return False

    def is_whole(self, atom: Any) -> bool:
        """Whether an array is no smaller array that is broadcast."""
        return self.origin(atom).aval.size == atom.aval.size

    def is_alone(self, atom: Any, like: Any) -> bool:
        """Whether nothing else reads a saved result of the type `like`, in whatever shape."""
        if (atom.aval.shape, atom.aval.dtype) != (like.shape, like.dtype):
            return False
        for var, eqn in self.back(atom):
            # A name is for the term, not for the sum.
            if self.readers[var] > 1 or checkpoint_name_of(eqn) is not None:
                return False
            if not rules.rule(eqn).passes:
                return self.made[var] in self.facts.saved
        return False

    def is_offloaded(self, atom: Any) -> bool:
        """Whether the policy offloads an array, perhaps in another shape and dtype."""
        return any(self.made[var] in self.facts.offloaded for var, _ in self.back(atom))

    def products(self, atom: Any) -> set[Any]:
        """The saved products that an array is the sum of, perhaps in other shapes and dtypes."""
        eqn = self.maker(atom)
        if eqn is None:
            return set()
        if rules.rule(eqn).product:
            return {atom}
        if not rules.rule(eqn).passes and operation(eqn) not in ("add", "sub"):
            return set()
        terms = (v for v in jaxprs.variables(eqn) if fact_of(self.facts.of, v).term)
        return set().union(*map(self.products, terms))

    def maxima(self, eqn: core.JaxprEqn) -> set[Any]:
        """The maxima of rows that a softmax subtracts before its exponential, `eqn`."""
        subtraction = self.maker(eqn.invars[0])
        if subtraction is None or not self.facts.of[eqn.outvars[0]].unit:
            return set()
        return set(jaxprs.variables(subtraction)[1:]) if operation(subtraction) == "sub" else set()
