"""Decides which arrays of a differentiated function to store, from its outputs to its inputs.

The function is differentiated first. In the jaxpr of `jax.jvp(fun)`, the backward runs the
equations that read a tangent, and the forward runs all others. Facts go through this jaxpr from
inputs to outputs (facts.py). Decisions go from outputs to inputs. Each array that an equation of
the backward reads is stored, or recomputed from other arrays, which are then needed in turn. If an
equation must not read rounded numbers (rules.py), the stored arrays behind its operand must be
exact. Then the jaxpr is rewritten.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lowmembp_jax._arguments import is_inexact
from lowmembp_jax._jax_internals import checkpoint_name_of, has_effects, operation, run_backward
from lowmembp_jax._messages import warn
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression._differences import Differences
from lowmembp_jax.compression._needs import EXACT, NOT, ROUNDED, WHOLE, Need, before, narrows
from lowmembp_jax.compression._origins import Origins
from lowmembp_jax.compression._recomputed import with_recomputed
from lowmembp_jax.compression._scaled_float8 import Rows
from lowmembp_jax.compression._store import Plan, rewritten
from lowmembp_jax.compression.facts import Fact, Facts, are_exact, fact_of, find_facts, of_any
from lowmembp_jax.compression.formats import Format
from lowmembp_jax.policies import NORM_AFFINE_OUTPUT, NORM_RSTD

# The backward of a norm divides its output by its scale; rstd is a statistic.
_NAMED_EXACT = {NORM_AFFINE_OUTPUT: None, NORM_RSTD: None}


@dataclass
class Marker:
    """Marks one function.

    Attributes:
      policy: a policy of `jax.checkpoint`, which says which results are saved.
      formats: names of the formats by `checkpoint_name`; None is the key for all other arrays.
      owner: the function's name in errors.
      offload: whether all stored arrays wait in the host's memory.
      seen: the `checkpoint_name`s of stored arrays.
    """

    policy: Callable[..., Any]
    formats: Mapping[str | None, str | None]
    owner: str
    offload: bool = False
    seen: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.formats = _NAMED_EXACT | dict(self.formats)

    def mark(
        self,
        jaxpr: core.Jaxpr,
        given: Sequence[Fact],
        wanted: Sequence[bool],
        kept: Sequence[bool],
    ) -> core.Jaxpr:
        """Inserts `store` after each variable that the backward reads from memory.

        Args:
          jaxpr: the jaxpr of the differentiated function.
          given: the facts about its inputs.
          wanted: which of its outputs are tangents.
          kept: which of its inputs are in memory anyway.
        """
        jaxpr = jaxprs.without_calls_of(jaxpr, lambda eqn: rules.rule(eqn).elementwise)
        needs = [Need(ROUNDED if one else NOT) for one in wanted]
        facts = find_facts(jaxpr, given, self.policy)
        decisions = _Decisions(self, jaxpr, facts)
        inputs = decisions.make(needs)
        if decisions.exact:
            facts = find_facts(jaxpr, given, self.policy, decisions.exact)
            decisions = _Decisions(self, jaxpr, facts)
            inputs = decisions.make(needs)
        for var, need, is_kept in zip(jaxpr.invars, inputs, kept, strict=True):
            if need.level and facts.of[var].lossy and not is_kept:
                format = self.format(var, facts.of[var], need)
                # Unrounded, the argument is in memory anyway.
                if format.storage is not None or format.host:
                    decisions.plan.stores[var] = format
        if unseen := self.formats.keys() - self.seen - {None} - _NAMED_EXACT.keys():
            warn(
                f"{self.owner}: dtype: nothing is saved under the name "
                f"{', '.join(sorted(map(repr, unseen)))}; use a policy that saves this name, and "
                f"give the name to the array that the backward reads"
            )
        marked = rewritten(jaxpr, decisions.plan)
        return with_recomputed(marked, [False] * len(given))[0]

    def format(self, var: Any, fact: Fact, need: Need) -> Format:
        """The format of an array that the backward needs."""
        is_named = need.name is not None and need.name in self.formats
        if need.name is not None:
            self.seen.add(need.name)
        is_statistic = need.level > ROUNDED or fact.reduced
        storage = self.formats.get(need.name if is_named else None)
        if not fact.lossy or (is_statistic and not is_named):
            storage = None
        host = self.offload or need.host
        return Format.of(var.aval, storage, self.owner, need.rows, fact.unit, host)


class _Decisions:
    """Decides which arrays of one jaxpr to store.

    Attributes:
      plan: the decisions.
      exact: the variables that the backward needs exactly, including variables inside bodies.
    """

    def __init__(self, marker: Marker, jaxpr: core.Jaxpr, facts: Facts, may_store: bool = True):
        self.marker, self.jaxpr, self.facts, self.may_store = marker, jaxpr, facts, may_store
        self.plan, self.needs, self.exact = Plan(), dict[Any, Need](), set[Any]()
        self.origins = Origins(jaxpr, facts)
        self.differences = Differences(jaxpr, self.origins, facts, self.needs)
        self.read_elementwise = set[Any]()  # by the forward
        for eqn in reversed(jaxpr.eqns):
            rule = rules.rule(eqn)
            is_forward = not any(fact.linear for fact in facts.read(eqn))
            computes = not rule.passes or eqn.outvars[0] in self.read_elementwise
            if rule.elementwise and is_forward and computes:
                self.read_elementwise.update(jaxprs.variables(eqn))

    def make(self, wanted: Sequence[Need]) -> list[Need]:
        """Decides from the needs of the outputs; returns the needs of the inputs."""
        for atom, need in zip(self.jaxpr.outvars, wanted, strict=True):
            self.need(atom, need)
        for number, eqn in reversed([*enumerate(self.jaxpr.eqns)]):
            results = list(map(self.needed, eqn.outvars))
            read, has_effect = self.facts.read(eqn), has_effects(eqn)
            if not has_effect and not any(need.level or need.rows for need in results):
                continue
            if number in self.facts.inside:
                self.of_bodies(number, eqn, results)
            elif has_effect and self.may_store and not any(fact.linear for fact in read):
                self.plan.effects.add(number)
            elif has_effect:
                for atom in eqn.invars:
                    self.need(atom, Need(EXACT))
            elif operation(eqn) == "custom_lin":
                self.of_custom_backward(eqn, read)
            elif any(fact.linear for fact in read):
                levels = zip(eqn.invars, read, self.as_read(eqn, read), strict=True)
                for atom, fact, level in levels:
                    self.need(atom, Need(ROUNDED if fact.linear else level))
            else:
                self.of_forward(number, eqn, read, results)
        for var, need in self.needs.items():
            fact = fact_of(self.facts.of, var)
            if need.level == EXACT and fact.lossy and not fact.reduced:
                self.exact.add(var)
        return list(map(self.needed, self.jaxpr.invars))

    def needed(self, var: Any) -> Need:
        return self.needs.get(var, Need())

    def need(self, atom: Any, need: Need) -> None:
        if isinstance(atom, core.Var):
            # The loop starts at the last equation, so this reader runs before the others.
            self.needs[atom] = need.join(self.needed(atom))

    def as_read(self, eqn: core.JaxprEqn, read: Sequence[Fact]) -> list[int]:
        levels = [WHOLE if i in rules.rule(eqn).whole else ROUNDED for i in range(len(read))]
        for i, fact in enumerate(read):
            if not (fact.normalizer or rules.may_round(eqn, i, fact.bounds)):
                levels[i] = EXACT
        return levels

    def of_bodies(self, number: int, eqn: core.JaxprEqn, wanted: list[Need]) -> None:
        """Decides in the bodies; the needs of a scan's step become needs of the step before."""
        bodies, inside = jaxprs.bodies(eqn), self.facts.inside[number]
        back = jaxprs.carried(eqn, bodies[0])
        wanted = [
            need._replace(rows=need.rows and need.rows.converted(var, out))
            for need, var, out in zip(wanted, eqn.outvars, bodies[0].outvars, strict=True)
        ]
        while True:
            decided = [
                _Decisions(self.marker, body, facts, self.may_store)
                for body, facts in zip(bodies, inside, strict=True)
            ]
            each = zip(*(decisions.make(wanted) for decisions in decided), strict=True)
            inputs = [functools.reduce(Need.join, needs) for needs in each]
            after = list(wanted)
            for need, out in zip(inputs, back, strict=True):
                if out is not None:
                    after[out] = need.join(after[out])
            if after == wanted:
                break
            wanted = after
        self.plan.inside[number] = [decisions.plan for decisions in decided]
        self.exact.update(*(decisions.exact for decisions in decided))
        for atom, var, need in zip(jaxprs.operands(eqn), bodies[0].invars, inputs, strict=True):
            rows = need.rows and need.rows.converted(var, atom)
            self.need(atom, need._replace(rows=rows))
        if eqn.primitive.name == "cond":
            self.need(eqn.invars[0], Need(EXACT))

    def of_custom_backward(self, eqn: core.JaxprEqn, read: Sequence[Fact]) -> None:
        """Traces the backward of a custom VJP to find how it needs its residuals."""
        count, cotangents = eqn.params["num_res"], eqn.params["out_avals"]
        real = [i for i, aval in enumerate(cotangents) if aval.dtype != jax.dtypes.float0]

        def backward(residuals, given):
            every: list[Any] = [np.zeros(a.shape, jax.dtypes.float0) for a in cotangents]
            for i, cotangent in zip(real, given, strict=True):
                every[i] = cotangent
            return run_backward(eqn, *residuals, *every)

        avals = [atom.aval for atom in eqn.invars[:count]], [cotangents[i] for i in real]
        try:
            jaxpr = jax.make_jaxpr(backward)(*avals).jaxpr
        except Exception:  # the user's code may need the context in which it runs later
            needs = [Need(EXACT)] * count
        else:
            given = [of_any([fact])._replace(reduced=fact.reduced) for fact in read[:count]]
            given += [Fact(linear=True)] * len(real)
            facts = find_facts(jaxpr, given, self.marker.policy)
            inside = _Decisions(self.marker, jaxpr, facts, may_store=False)
            needs = inside.make([Need(ROUNDED)] * len(jaxpr.outvars))[:count]
        # The backward may use an equation between its residuals. In flash attention, a product with
        # the output cancels products with the values. Statistics are stored exactly anyway.
        needed = [a for a, need in zip(eqn.invars, needs, strict=False) if need.level]
        results = [atom for atom in needed if not fact_of(self.facts.of, atom).reduced]
        is_equation = any(self.origins.follows(atom, needed) for atom in results)
        for atom, need in zip(eqn.invars[:count], needs, strict=True):
            level = EXACT if need.level and is_equation else need.level
            self.need(atom, need._replace(level=level, name=None, saved=False, host=False))
        for atom in eqn.invars[count:]:  # the tangents
            self.need(atom, Need(ROUNDED))

    def of_forward(self, number: int, eqn: Any, read: list[Fact], results: list[Need]):
        """Stores results, or needs the operands to recompute the results."""
        rest = [need._replace(level=NOT) for need in results]
        is_difference = any(need.level for need in results) and self.differences.has(eqn, read)
        centered, rows_of = self.differences.rows_of_mean(eqn, read if is_difference else [])
        cancels = is_difference and rows_of is None
        selects = rules.rule(eqn).selects and self.reads_exactly(eqn, read)
        is_rounded = (cancels or selects) and self.may_round(number, results)
        for i, (var, need) in enumerate(zip(eqn.outvars, results, strict=True)):
            if need.level:
                # Recomputed from rounded numbers, a choice could come out differently.
                need = need._replace(level=EXACT if _is_discrete(var) else need.level)
                if is_rounded and need.level == ROUNDED:
                    format = self.marker.format(var, self.facts.of[var], need)
                else:
                    format = self.stored(number, eqn, read, var, need)
                if format is None or not self.may_store:
                    rest[i] = need
                else:
                    self.plan.stores[var] = format
                    if not format.is_exact:
                        self.plan.barriers |= self.origins.maxima(eqn)
                        if var in self.read_elementwise:
                            self.plan.barriers |= self.origins.products(var)
        most = max(need.level for need in rest)
        if rules.rule(eqn).passes or operation(eqn) == "optimization_barrier":
            # Each result is the operand with the same number.
            for atom, need in zip(eqn.invars, rest, strict=False):
                rows = before(need.rows, eqn, atom)
                own = checkpoint_name_of(eqn)
                saved = need.saved or (own is not None and number in self.facts.saved)
                host = need.host or (own is not None and number in self.facts.offloaded)
                name = own or need.name
                new = Need(need.level, name, saved, rows, host) if need.level else Need(rows=rows)
                self.need(atom, new)
            return
        if most and self.facts.of[eqn.outvars[0]].normalizer and read[0].at_hand:
            self.plan.barriers.update(eqn.outvars)
        if most and cancels and not is_rounded:
            most = EXACT
        levels = self.as_read(eqn, read) if most else [NOT] * len(read)
        if most == EXACT or (most == WHOLE and rules.is_cheap(eqn)):
            levels = [max(most, level) for level in levels]
        for atom, level in zip(eqn.invars, levels, strict=True):
            rows = before(rest[0].rows, eqn, atom) or (rows_of if atom is centered else None)
            if rules.rule(eqn).reduces and results[0].level:
                rows = Rows(atom.aval.shape, tuple(eqn.params["axes"]))
            self.need(atom, Need(level, rows=rows))

    def stored(self, number: int, eqn: core.JaxprEqn, read: list[Fact], var: Any, need: Need):
        """The format of a result, or None if it is recomputed."""
        name, fact = operation(eqn), self.facts.of[var]
        exact = Format.of(var.aval, None, self.marker.owner, host=self.marker.offload)
        need = need._replace(host=need.host or number in self.facts.offloaded)
        if _is_discrete(var):
            # Reductions are stored exactly, so a choice that depends on them alone comes out the
            # same when it is recomputed.
            chooses = any(
                ((fact.lossy and not fact.reduced) or fact.random) and is_inexact(atom.aval)
                for fact, atom in zip(read, eqn.invars, strict=True)
            )
            # Sorting again takes longer than reading; a name stands for a code of several choices.
            is_kept = name in ("name", "sort") and (fact.lossy or fact.random)
            return exact if chooses or is_kept else None
        # Where errors of two results may not cancel, as in a quotient of numbers near 0, both must
        # be computed from the same numbers. A format for a name applies all the same.
        is_cheap = rules.is_cheap(eqn) and not self.is_named(var)
        if is_cheap and (are_exact(read) or self.reads_exactly(eqn, read)):
            return None
        if rules.rule(eqn).again and not self.is_named(var):
            is_stored = any(map(self.is_named, eqn.outvars))
            return exact if is_stored or not any(map(self.is_rounded, eqn.invars)) else None
        if self.replaces_terms(eqn, read, need):
            need = need._replace(host=need.host or any(map(self.origins.is_offloaded, eqn.invars)))
            return self.marker.format(var, fact, need)
        is_saved = need.saved or number in self.facts.saved
        is_whole = need.level > ROUNDED and fact.lossy and not fact.reduced
        if is_cheap and is_whole and not (is_saved and narrows(eqn, need)):
            return None
        is_softmax = fact.unit and name in ("exp", "exp2") and read[0].at_hand
        # Another sharding may take a collective, which does not run again if the policy saves it.
        is_moved = name in ("reshard", "sharding_constraint")
        is_made = not rules.rule(eqn).passes or is_moved or narrows(eqn, need)
        if is_softmax or (is_saved and is_made):
            return self.marker.format(var, fact, need)
        if need.level == EXACT and fact.lossy and rules.rule(eqn).reduces:
            return exact
        return None

    def is_named(self, var: Any) -> bool:
        """Whether a format is given for the `checkpoint_name` of an array."""
        return self.needed(var).name in self.marker.formats.keys() - {None}

    def is_rounded(self, atom: Any) -> bool:
        """Whether the backward reads an array that is stored in fewer bits, or made from such."""
        fact, level = fact_of(self.facts.of, atom), self.needed(atom).level
        is_exact = not fact.lossy or fact.reduced or level == EXACT
        if is_exact or not any(self.marker.formats.values()):
            return False
        if not fact.term:
            return True
        if level == WHOLE:
            return False
        names = (checkpoint_name_of(eqn) for _, eqn in self.origins.back(atom))
        name = next((name for name in names if name and name in self.marker.formats), None)
        return self.marker.formats.get(name) is not None

    def may_round(self, number: int, results: list[Need]) -> bool:
        """Whether results take fewer bytes in 8 bits than the exact numbers behind them."""
        eqn, size = self.jaxpr.eqns[number], 0
        for var, need in zip(eqn.outvars, results, strict=True):
            if need.level and not _is_discrete(var):
                format = self.marker.format(var, self.facts.of[var], need)
                if format.is_exact:
                    return False
                size += math.prod(var.aval.shape)  # type: ignore
        can_store = self.may_store and size and number not in self.facts.saved
        return bool(can_store) and self.differences.are_less_than_sources(eqn, size)

    def reads_exactly(self, eqn: core.JaxprEqn, read: list[Fact]) -> bool:
        """Whether an operand, other than a statistic, must be exact."""
        levels = zip(self.as_read(eqn, read), read, strict=True)
        return any(level == EXACT and fact.lossy and not fact.reduced for level, fact in levels)

    def replaces_terms(self, eqn: core.JaxprEqn, read: list[Fact], need: Need) -> bool:
        """Whether to store a sum instead of a saved term that nothing else reads.

        This holds if the other term is saved, too, if a norm reads the sum, which is then stored
        by the norm's rows, or if the other term is a trained bias, which XLA adds in the product's
        kernel.
        """
        pairs = [*zip(eqn.invars, read, strict=True)]
        ours = [(atom, fact) for atom, fact in pairs if fact.activation]
        if operation(eqn) not in ("add", "sub") or (need.level == EXACT and len(ours) > 1):
            return False
        if len(ours) == 1:
            # Not a constant, such as a mask: beside -1e9 the other numbers of a row would be lost.
            is_trained = all(fact.varied for _, fact in pairs)
            return is_trained and self.origins.is_alone(ours[0][0], eqn.outvars[0].aval)
        is_one = all(fact.term for _, fact in ours) or need.rows is not None
        alone = [atom for atom, fact in ours if fact.term and self.origins.readers[atom] == 1]
        return is_one and any(map(self.origins.is_whole, alone))


def _is_discrete(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", np.float32)
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
