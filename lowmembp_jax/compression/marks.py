"""Where `store` goes in a differentiated function: one pass of facts, decisions and rewriting.

The function is differentiated first. In the jaxpr of `jax.jvp(fun)` an equation that reads a
tangent is what the backward runs; all others are the forward. Facts go through that jaxpr
downwards: what depends on an activation, on what is differentiated, on a tangent. Decisions go
upwards: the backward needs what its equations read, and each of these arrays is stored or computed
again from others, which are then needed in turn. Where an equation may not read a rounded number,
that need for exactness is followed up to the array that is stored.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import Offloadable, Recompute
from jax.extend import core

from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression.copies import with_copies
from lowmembp_jax.compression.formats import storage_dtype
from lowmembp_jax.compression.rules import Fact
from lowmembp_jax.compression.store import Format, store_p
from lowmembp_jax.jax_internals import checkpoint_name_of, has_effects, operation, run_backward
from lowmembp_jax.policies import NORM_AFFINE_OUTPUT, NORM_RSTD

#: How the backward needs an array. Higher needs include the lower ones.
#: WHOLE: stored as it is, if it is stored; it may be computed again from rounded numbers.
NOT, ROUNDED, WHOLE, EXACT = range(4)
_NAMED_EXACT = {NORM_AFFINE_OUTPUT: None, NORM_RSTD: None}


class Facts(NamedTuple):
    """The facts of a jaxpr's variables.

    Attributes:
      of: by variable.
      inside: those of the bodies of its equations, by number.
      named: variables that the policy saves under a name that they get later.
    """

    of: dict[Any, Fact]
    inside: dict[int, list["Facts"]]
    named: set[Any]

    def read(self, eqn: core.JaxprEqn) -> list[Fact]:
        return [_fact(self.of, atom) for atom in eqn.invars]


@dataclass
class Plan:
    """What to store in a jaxpr, by variable, and in the bodies of its equations."""

    stores: dict[Any, Format] = field(default_factory=dict)
    inside: dict[int, list["Plan"]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stores) or any(any(plans) for plans in self.inside.values())


class Need(NamedTuple):
    """How a variable is needed, and the `checkpoint_name` that it has further on."""

    level: int = NOT
    name: str | None = None


def _fact(of: Mapping[Any, Fact], atom: Any) -> Fact:
    if isinstance(atom, core.Literal):
        return Fact(bounds=rules.literal_bounds(atom))
    return of.get(atom, Fact())


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", np.int32), jnp.inexact)


def _is_discrete(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and (dtype == bool or jnp.issubdtype(dtype, jnp.integer))


def _narrows(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a cast to a smaller dtype."""
    if operation(eqn) != "convert_element_type":
        return False
    return eqn.params["new_dtype"].itemsize < eqn.invars[0].aval.dtype.itemsize


def _size(atom: Any) -> Any:
    return math.prod(getattr(atom.aval, "shape", ()))


@dataclass
class Marker:
    """Marks one function.

    Attributes:
      policy: of `jax.checkpoint`: which results are saved.
      dtypes: what they are stored in, by `checkpoint_name`; None is the key for all others.
      owner: of the function, for errors.
      seen: names of what is stored.
    """

    policy: Callable[..., Any]
    dtypes: Mapping[str | None, Any]
    owner: str
    seen: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.dtypes = _NAMED_EXACT | dict(self.dtypes)

    # --- Facts, downwards.

    def saves(self, eqn: core.JaxprEqn) -> bool:
        """Whether the policy saves the equation's results."""
        answer = self.policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
        if isinstance(answer, Offloadable):
            raise ValueError(
                f"{self.owner}: policy: expected a policy that saves or recomputes, got one that "
                f"offloads a result of {eqn.primitive} to {answer.dst!r}; use jax.checkpoint for it"
            )
        return answer not in (False, Recompute)

    def facts(self, jaxpr: core.Jaxpr, given: Sequence[Fact]) -> Facts:
        """The facts of all variables, from those of the jaxpr's inputs."""
        of: dict[Any, Fact] = dict(zip(jaxpr.invars, given, strict=True))
        found, infinite = Facts(of, {}, set()), set[Any]()
        for number, eqn in enumerate(jaxpr.eqns):
            read = found.read(eqn)
            bodies = [] if rules.is_known(eqn) else jaxprs.bodies(eqn)
            if bodies:
                results = self._facts_inside(found, number, eqn, bodies)
            elif operation(eqn) == "eq" and any(fact.bounds[0] == math.inf for fact in read):
                infinite.add(eqn.outvars[0])
                results = [_of_any(read)]
            elif operation(eqn) == "select_n" and eqn.invars[0] in infinite:
                results = [read[1]]  # as of what is not infinite
            else:
                results = self._facts_of_results(eqn, read)
            if operation(eqn) == "name" and self.saves(eqn) and read[0].source is not None:
                found.named.add(read[0].source)
            sources = {fact.source for fact in read} - {None}
            for var, fact in zip(eqn.outvars, results, strict=True):
                of[var] = fact if fact.source in sources else fact._replace(source=var)
        return found

    def _facts_inside(self, found: Facts, number: int, eqn, bodies) -> list[Fact]:
        read = [_fact(found.of, atom) for atom in jaxprs.operands(eqn)]
        is_slice = [
            getattr(a.aval, "shape", None) != getattr(v.aval, "shape", None)
            for a, v in zip(jaxprs.operands(eqn), bodies[0].invars, strict=True)
        ]
        back = jaxprs.carried(eqn, bodies[0])
        given = [
            _of_any([fact]) if is_part or out is not None else fact
            for fact, is_part, out in zip(read, is_slice, back, strict=True)
        ]
        while True:
            inside = [self.facts(body, given) for body in bodies]
            every = [
                [_fact(facts.of, body.outvars[i]) for facts, body in zip(inside, bodies, strict=True)]
                for i in range(len(eqn.outvars))
            ]
            results = [facts[0] if len(facts) == 1 else _of_any(facts) for facts in every]
            after = [
                fact if out is None else _of_any([fact, results[out]])
                for fact, out in zip(given, back, strict=True)
            ]
            if after == given:
                break
            given = after
        found.inside[number] = inside
        if eqn.primitive.name == "cond":  # which branch ran is a fact of the results
            index = _of_any([_fact(found.of, eqn.invars[0])])
            results = [_of_any([fact, index]) for fact in results]
        if eqn.primitive.name in ("scan", "shard_map"):
            results = [_of_any([fact])._replace(bounds=fact.bounds) for fact in results]
        return results

    def _facts_of_results(self, eqn: core.JaxprEqn, read: list[Fact]) -> list[Fact]:
        name, either = operation(eqn), _of_any(read)
        if name in rules.RANDOM:
            either = either._replace(random=True)
        if either.linear:
            return [either] * len(eqn.outvars)
        if name == "optimization_barrier":
            return [fact._replace(source=None, above=frozenset(), shifted=False) for fact in read]
        first = read[0] if read else Fact()
        passes = name in rules.PASSED
        is_saved = self.saves(eqn) and (not passes or name == "name")
        own = either._replace(bounds=rules.bounds(eqn, [fact.bounds for fact in read]))
        if passes and name not in ("neg", "rev", "transpose") and not _narrows(eqn):
            own = own._replace(source=first.source, above=first.above, shifted=first.shifted)
        if name in ("reduce_max", "logaddexp"):
            own = own._replace(above=frozenset(fact.source for fact in read if fact.source))
        if name in ("max", "pmax"):
            own = own._replace(above=frozenset[Any]().union(*(fact.above for fact in read)))
        if name == "sub" and first.source is not None and first.source in read[1].above:
            own = own._replace(bounds=(-math.inf, 0), shifted=eqn.invars[0].aval.shape != ())
        ours = [fact for fact in read if fact.activation]
        scales = len(ours) == 1 and (name == "mul" or (name == "div" and first.activation))
        is_made = passes or scales or name in ("add", "sub")
        out = eqn.outvars[0] if eqn.outvars else None
        near = any(
            fact.at_hand and _size(atom) == _size(out)
            for fact, atom in zip(read, eqn.invars, strict=True)
        )
        own = own._replace(
            reduced=name in rules.REDUCTIONS
            or (bool(ours) and all(fact.reduced for fact in read if fact.lossy)),
            term=is_saved or (is_made and bool(ours) and all(fact.term for fact in ours)),
            at_hand=is_saved or near,
        )
        others = either._replace(term=is_saved, at_hand=is_saved)
        return [own, *[others] * len(eqn.outvars)][: len(eqn.outvars)]

    # --- Decisions, upwards.

    def decide(
        self, jaxpr: core.Jaxpr, facts: Facts, wanted: Sequence[Need], may_store: bool = True
    ) -> tuple[Plan, list[Need]]:
        """What to store, and how the inputs are needed, from how the outputs are."""
        plan, needs, names = Plan(), dict[Any, int](), dict[Any, str]()
        readers = dict[Any, int]()
        for eqn in jaxpr.eqns:
            for var in set(jaxprs.variables(eqn)):
                readers[var] = readers.get(var, 0) + 1

        def need(atom, level, name=None):
            if isinstance(atom, core.Var):
                needs[atom] = max(needs.get(atom, NOT), level)
                if name is not None:
                    names.setdefault(atom, name)

        for atom, (level, name) in zip(jaxpr.outvars, wanted, strict=True):
            need(atom, level, name)
        for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
            read = facts.read(eqn)
            results = [Need(needs.get(var, NOT), names.get(var)) for var in eqn.outvars]
            effects = has_effects(eqn)
            if not effects and not any(result.level for result in results):
                continue
            if number in facts.inside:
                bodies = jaxprs.bodies(eqn)
                plans, inputs = self._decide_inside(eqn, bodies, facts.inside[number], results, may_store)
                plan.inside[number] = plans
                for atom, one in zip(jaxprs.operands(eqn), inputs, strict=True):
                    need(atom, *one)
                if eqn.primitive.name == "cond":
                    need(eqn.invars[0], EXACT)
            elif effects:
                for atom in eqn.invars:
                    need(atom, EXACT)
            elif operation(eqn) == "custom_lin":
                for atom, one in zip(eqn.invars, self._needs_of_backward(eqn, read), strict=True):
                    need(atom, one)
            elif any(fact.linear for fact in read):
                for i, (atom, fact) in enumerate(zip(eqn.invars, read, strict=True)):
                    may = fact.linear or rules.may_round(eqn, read)[i]
                    level = WHOLE if rules.is_statistic(eqn, i) else ROUNDED
                    need(atom, level if may else EXACT)
            else:
                self._decide_equation(plan, eqn, facts, read, results, readers, need, may_store)
        inputs = [Need(needs.get(var, NOT), names.get(var)) for var in jaxpr.invars]
        return plan, inputs

    def _decide_inside(self, eqn, bodies, inside, results, may_store):
        back = jaxprs.carried(eqn, bodies[0])
        wanted = list(results)
        while True:
            decided = [
                self.decide(body, facts, wanted, may_store)
                for body, facts in zip(bodies, inside, strict=True)
            ]
            inputs = [
                Need(max(one.level for one in each), next((one.name for one in each if one.name), None))
                for each in zip(*(needs for _, needs in decided), strict=True)
            ]
            after = list(wanted)
            for one, out in zip(inputs, back, strict=True):
                if out is not None:  # a step needs what the step before gave
                    after[out] = Need(max(one.level, after[out].level), after[out].name)
            if after == wanted:
                return [plan for plan, _ in decided], inputs
            wanted = after

    def _needs_of_backward(self, eqn: core.JaxprEqn, read: list[Fact]) -> list[int]:
        """How the backward of a custom VJP needs its residuals; tangents are needed to be computed."""
        count = eqn.params["num_res"]
        cotangents = eqn.params["out_avals"]
        real = [i for i, aval in enumerate(cotangents) if aval.dtype != jax.dtypes.float0]

        def backward(residuals, given):
            every: list[Any] = [np.zeros(a.shape, jax.dtypes.float0) for a in cotangents]
            for i, cotangent in zip(real, given, strict=True):
                every[i] = cotangent
            return run_backward(eqn, *residuals, *every)

        avals = [atom.aval for atom in eqn.invars[:count]], [cotangents[i] for i in real]
        try:
            jaxpr = jax.make_jaxpr(backward)(*avals).jaxpr
        except Exception:  # code of the user's that cannot be traced here: its residuals are exact
            return [EXACT] * count + [ROUNDED] * (len(eqn.invars) - count)
        given = [_of_any([fact]) for fact in read[:count]] + [Fact(linear=True)] * len(real)
        facts = self.facts(jaxpr, given)
        _, needs = self.decide(jaxpr, facts, [Need(ROUNDED)] * len(jaxpr.outvars), may_store=False)
        return [one.level for one in needs[:count]] + [ROUNDED] * (len(eqn.invars) - count)

    def _decide_equation(self, plan, eqn, facts, read, results, readers, need, may_store):
        """What to store of an equation of the forward, and what it needs where it runs again."""
        name, rest = operation(eqn), [NOT] * len(results)
        is_saved = name not in rules.PASSED and self.saves(eqn)
        chooses = any(
            ((fact.lossy and not fact.reduced) or fact.random) and _is_inexact(atom)
            for fact, atom in zip(read, eqn.invars, strict=True)
        )
        for i, (var, (level, key)) in enumerate(zip(eqn.outvars, results, strict=True)):
            if level == NOT:
                continue
            fact, format = facts.of[var], None
            if _is_discrete(var):
                # Computed again from rounded numbers it could come out differently. Reductions are
                # stored exactly, so that what is computed from them is the same again.
                level = EXACT
                if chooses or (name == "name" and (fact.lossy or fact.random)):
                    format = self._exact(var)
            elif is_saved or var in facts.named or self._is_sum(name, eqn, read, readers) or (
                name == "exp" and read[0].shifted and read[0].at_hand
            ):
                format = self.format(var, fact, Need(level, key))
            elif level == EXACT and fact.lossy and name in rules.REDUCTIONS:
                format = self._exact(var)
            if format is None or not may_store:
                rest[i] = level
            else:
                plan.stores[var] = format
        if not any(rest):
            return
        if name in rules.PASSED or name == "optimization_barrier":
            # Each result is the operand in its place.
            for atom, (_, key), level in zip(eqn.invars, results, rest, strict=False):
                need(atom, level, checkpoint_name_of(eqn) or key)
        else:
            for atom, may in zip(eqn.invars, rules.may_round(eqn, read), strict=True):
                level = EXACT if max(rest) == EXACT else ROUNDED
                need(atom, level if may else EXACT)

    @staticmethod
    def _is_sum(name, eqn, read, readers) -> bool:
        """Whether a result takes the place of two saved ones, one of which nothing else reads."""
        terms = [
            atom
            for atom, fact in zip(eqn.invars, read, strict=True)
            if fact.term and fact.activation and isinstance(atom, core.Var)
        ]
        ours = [fact for fact in read if fact.activation]
        is_sum = name in ("add", "sub") and len(terms) == len(ours) == 2
        return is_sum and any(readers[atom] == 1 for atom in terms)

    def _exact(self, var: Any) -> Format:
        is_bool = var.aval.dtype == bool and var.aval.shape
        return Format(jnp.dtype(jnp.uint2) if is_bool else None, 1, self.owner)

    def format(self, var: Any, fact: Fact, need: Need) -> Format:
        """How a floating array is stored that the backward needs."""
        if need.name is not None:
            self.seen.add(need.name)
        is_named = need.name in self.dtypes and need.name is not None
        if not fact.lossy or not _is_inexact(var) or (need.level > ROUNDED and not is_named):
            return self._exact(var)
        dtype = storage_dtype(var.aval, self.dtypes[need.name] if is_named else self.dtypes.get(None))
        # What is at most 1, such as a softmax, leaves the upper half of a float's range empty.
        low, high = fact.bounds
        fills = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and -1 <= low and high <= 1
        return Format(dtype, 256 if fills else 1, self.owner)

    # --- The whole of it.

    def mark(self, jaxpr: core.Jaxpr, given: Sequence[Fact], wanted: Sequence[bool]) -> core.Jaxpr:
        """The jaxpr with `store` behind what its backward reads from memory.

        Args:
          jaxpr: of the differentiated function.
          given: facts of its inputs.
          wanted: which of its outputs are tangents.
        """
        jaxpr = jaxprs.without_calls_of(jaxpr, rules.is_elementwise)
        facts = self.facts(jaxpr, given)
        plan, inputs = self.decide(jaxpr, facts, [Need(ROUNDED if one else NOT) for one in wanted])
        for var, one in zip(jaxpr.invars, inputs, strict=True):
            if one.level == ROUNDED and facts.of[var].lossy:
                format = self.format(var, facts.of[var], one)
                if format.dtype is not None:
                    plan.stores[var] = format
        if unseen := self.dtypes.keys() - self.seen - {None} - _NAMED_EXACT.keys():
            warnings.warn(
                f"{self.owner}: dtype: nothing is saved under the name "
                f"{', '.join(map(repr, sorted(unseen)))}; let the policy save it, and give the "
                f"name to the array that the backward reads",
                stacklevel=2,
            )
        return with_copies(rewritten(jaxpr, plan), [fact.linear for fact in given])


def _of_any(read: Sequence[Fact]) -> Fact:
    """What is so of a value that is computed from others."""
    return Fact(
        activation=any(fact.activation for fact in read),
        varied=any(fact.varied for fact in read),
        linear=any(fact.linear for fact in read),
        random=any(fact.random for fact in read),
    )


def rewritten(jaxpr: core.Jaxpr, plan: Plan) -> core.Jaxpr:
    """The jaxpr with the stores of a plan; what reads a stored array reads what `store` gives."""
    new, stored = [], dict[Any, Any]()

    def store(var):
        stored[var] = core.Var(var.aval)
        like = jaxpr.eqns[0] if not new else new[-1]
        params = {"format": plan.stores[var], "times": 1}
        new.append(
            like.replace(primitive=store_p, invars=[var], outvars=[stored[var]], params=params, effects=set())
        )

    def read(atom):
        return stored.get(atom, atom) if isinstance(atom, core.Var) else atom

    for var in jaxpr.invars:
        if var in plan.stores:
            store(var)
    for number, eqn in enumerate(jaxpr.eqns):
        plans = plan.inside.get(number, ())
        if any(plans):
            bodies = map(rewritten, jaxprs.bodies(eqn), plans)
            eqn = jaxprs.with_bodies(eqn, list(bodies))
        new.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
        for var in eqn.outvars:
            if var in plan.stores:
                store(var)
    return jaxpr.replace(eqns=new, outvars=[read(atom) for atom in jaxpr.outvars])
