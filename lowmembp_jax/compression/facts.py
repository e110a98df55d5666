"""Facts about each variable of a differentiated function, from its inputs to its outputs."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import Offloadable, Recompute
from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import jaxprs, rules

Policy = Callable[..., Any]


class Maximum(NamedTuple):
    """The largest elements of a variable over some of its axes.

    Attributes:
      of: the variable.
      axes: the axis of `of` for each axis of the maximum, or None for an axis over which the
        maximum is broadcast.
    """

    of: Any
    axes: tuple[int | None, ...]


class Fact(NamedTuple):
    """The facts about a variable of the differentiated function.

    Attributes:
      activation: depends on an argument that is not a parameter.
      varied: depends on a differentiated input.
      linear: depends on a tangent, so the backward computes it instead of the forward.
      random: depends on random numbers.
      maximum: the variable holds these maxima.
      shifted: the axes of the maximum, if this is x - max(x), which is not positive.
      unit: the same axes, if this is the exp of such a variable, between 0 and 1.
      normalizer: is the sum of such an exp over these axes, recomputed from rounded numbers. It is
        at least 1, and its error is in proportion.
      reduced: is computed elementwise from reductions, such as the statistics of a norm.
      term: is computed cheaply from results that the policy saves.
      at_hand: is computed elementwise from an array of the same size that the policy saves.
      exact: is computed cheaply from arrays that the backward needs exactly.
    """

    activation: bool = False
    varied: bool = False
    linear: bool = False
    random: bool = False
    maximum: Maximum | None = None
    shifted: frozenset[int] | None = None
    unit: frozenset[int] | None = None
    normalizer: bool = False
    reduced: bool = False
    term: bool = False
    at_hand: bool = False
    exact: bool = False

    @property
    def lossy(self) -> bool:
        """Whether the backward may compute it from rounded numbers."""
        return self.activation and self.varied and not self.linear


class Facts(NamedTuple):
    """The facts about a jaxpr's variables.

    Attributes:
      of: the fact about each variable.
      inside: the facts of the bodies of its equations, by the equation's number.
      saved: numbers of the equations whose results the policy saves.
    """

    of: dict[Any, Fact]
    inside: dict[int, list["Facts"]]
    saved: set[int]

    def read(self, eqn: core.JaxprEqn) -> list[Fact]:
        return [fact_of(self.of, atom) for atom in eqn.invars]


def fact_of(of: Mapping[Any, Fact], atom: Any) -> Fact:
    return Fact() if isinstance(atom, core.Literal) else of.get(atom, Fact())


def of_any(read: Sequence[Fact]) -> Fact:
    """The fact of a value that is computed from values with these facts."""
    return Fact(
        activation=any(fact.activation for fact in read),
        varied=any(fact.varied for fact in read),
        linear=any(fact.linear for fact in read),
        random=any(fact.random for fact in read),
    )


def find_facts(
    jaxpr: core.Jaxpr, given: Sequence[Fact], policy: Policy, exact: Container[Any] = ()
) -> Facts:
    """Finds the facts of all variables from the facts of the jaxpr's inputs.

    Args:
      exact: the variables that the backward needs exactly, including variables inside bodies.
    """
    found = Facts({}, {}, set())
    for var, fact in zip(jaxpr.invars, given, strict=True):
        found.of[var] = fact._replace(exact=fact.exact or var in exact)
    for number, eqn in enumerate(jaxpr.eqns):
        bodies = [] if rules.is_known(eqn) else jaxprs.bodies(eqn)
        if bodies:
            results = _inside(found, number, eqn, bodies, policy, exact)
        else:
            if is_saved := _saves(policy, eqn):
                found.saved.add(number)
            results = _of_results(eqn, found.read(eqn), is_saved)
        for var, fact in zip(eqn.outvars, results, strict=True):
            found.of[var] = fact._replace(exact=fact.exact or var in exact)
    return found


def _inside(found: Facts, number: int, eqn, bodies, policy: Policy, exact) -> list[Fact]:
    read = [fact_of(found.of, atom) for atom in jaxprs.operands(eqn)]
    is_slice = [
        getattr(a.aval, "shape", None) != getattr(v.aval, "shape", None)
        for a, v in zip(jaxprs.operands(eqn), bodies[0].invars, strict=True)
    ]
    back = jaxprs.carried(eqn, bodies[0])
    if eqn.primitive.name in ("checkpoint", "remat2") and _saves(policy, eqn):
        # The policy saves what the function computes, so a `jax.checkpoint` inside keeps its own.
        policy = eqn.params["policy"] or jax.checkpoint_policies.nothing_saveable
    given = [
        of_any([fact]) if is_part or out is not None else fact
        for fact, is_part, out in zip(read, is_slice, back, strict=True)
    ]
    while True:
        inside = [find_facts(body, given, policy, exact) for body in bodies]
        every = [
            [fact_of(facts.of, body.outvars[i]) for facts, body in zip(inside, bodies, strict=True)]
            for i in range(len(eqn.outvars))
        ]
        results = [facts[0] if len(facts) == 1 else of_any(facts) for facts in every]
        after = [
            fact if out is None else of_any([fact, results[out]])
            for fact, out in zip(given, back, strict=True)
        ]
        if after == given:
            break
        given = after
    found.inside[number] = inside
    if eqn.primitive.name == "cond":  # the results also depend on the choice of the branch
        index = of_any([fact_of(found.of, eqn.invars[0])])
        results = [of_any([fact, index]) for fact in results]
    if eqn.primitive.name in ("scan", "shard_map"):
        results = [of_any([fact])._replace(unit=fact.unit) for fact in results]
    return results


def _of_results(eqn: Any, read: list[Fact], is_saved: bool) -> list[Fact]:
    if not eqn.outvars:
        return []
    rule, either = rules.rule(eqn), of_any(read)
    either = either._replace(random=either.random or rule.random)
    if either.linear:
        return [either] * len(eqn.outvars)
    if operation(eqn) == "optimization_barrier":
        return [fact._replace(maximum=None, shifted=None) for fact in read]
    first = read[0] if read else Fact()
    is_saved = is_saved and (not rule.passes or operation(eqn) == "name")
    ours = [fact for fact in read if fact.activation]
    scales = len(ours) == 1 and (
        operation(eqn) == "mul" or (operation(eqn) == "div" and first.activation)
    )
    is_made = rule.passes or scales or operation(eqn) in ("add", "sub")
    near = all(fact.at_hand or fact.reduced for fact in read if fact.lossy) and any(
        fact.at_hand and _size(atom) == _size(eqn.outvars[0])
        for fact, atom in zip(read, eqn.invars, strict=True)
    )
    is_exp = operation(eqn) in ("exp", "exp2")
    keeps = rule.passes and operation(eqn) not in ("neg", "transpose")
    # A recomputed softmax must divide by the sum of the same rounded numbers.
    is_sum = operation(eqn) == "reduce_sum" and first.unit is not None and not first.at_hand
    is_normalizer = is_sum and first.unit <= {*eqn.params["axes"]}
    own = either._replace(
        maximum=_maximum(eqn, read),
        shifted=_shifted(eqn, read[1].maximum) if operation(eqn) == "sub" else None,
        unit=first.shifted if is_exp else first.unit if keeps else None,
        normalizer=is_normalizer or (rule.passes and first.normalizer),
        reduced=(rule.reduces and not is_normalizer)
        or (
            rules.rule(eqn).elementwise
            and bool(ours)
            and all(fact.reduced for fact in read if fact.lossy)
        ),
        term=is_saved or (is_made and bool(ours) and all(fact.term for fact in ours)),
        at_hand=is_saved or near,
        exact=rules.is_cheap(eqn) and are_exact(read),
    )
    others = either._replace(term=is_saved, at_hand=is_saved, exact=own.exact)
    return [own, *[others] * (len(eqn.outvars) - 1)]


def are_exact(read: Sequence[Fact]) -> bool:
    """Whether an equation reads lossy values, and all of them are exact."""
    lossy = [fact for fact in read if fact.lossy]
    return bool(lossy) and all(fact.exact for fact in lossy)


def _maximum(eqn: Any, read: Sequence[Fact]) -> Maximum | None:
    """The maximum that the first result holds, if this is known."""
    name, given = operation(eqn), read[0].maximum if read else None
    if name == "reduce_max":
        x = eqn.invars[0]
        kept = (i for i in range(len(x.aval.shape)) if i not in eqn.params["axes"])
        return Maximum(x, tuple(kept))
    if name == "select_n" and len(read) == 3:  # where(isfinite(maximum), maximum, 0)
        return read[2].maximum if isinstance(eqn.invars[1], core.Literal) else None
    if given is None or not rules.rule(eqn).passes:
        return None
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * len(new)
        for i, to in enumerate(eqn.params["broadcast_dimensions"]):
            axes[to] = given.axes[i] if shape[i] == new[to] else None
        return given._replace(axes=tuple(axes))
    is_same = shape == new and name in ("name", "stop_gradient", "copy", "pvary", "pcast")
    return given if is_same else None


def _shifted(eqn: Any, maximum: Maximum | None) -> frozenset[int] | None:
    """The axes of the second operand, a maximum of the first over elements that include its own."""
    if maximum is None or maximum.of is not eqn.invars[0]:
        return None
    if any(axis not in (None, place) for place, axis in enumerate(maximum.axes)):
        return None
    return frozenset(place for place, axis in enumerate(maximum.axes) if axis is None)


def _saves(policy: Policy, eqn: core.JaxprEqn) -> bool:
    answer = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    if isinstance(answer, Offloadable):
        raise ValueError(
            f"compress: policy: expected a policy that saves or recomputes, got a policy that "
            f"offloads a result of {eqn.primitive} to {answer.dst!r}; use jax.checkpoint to offload"
        )
    return answer not in (False, Recompute)


def _size(atom: Any) -> Any:
    return math.prod(getattr(atom.aval, "shape", ()))
