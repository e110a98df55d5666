"""Facts about each variable of a differentiated function, from its inputs to its outputs."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import Offloadable, Recompute
from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.policies import everything_saveable

Policy = Callable[..., Any]


#: A variable, and for each axis of an array with its elements the axis of the variable, or None for
#: an axis over which the variable is broadcast.
Place = tuple[Any, tuple[int | None, ...]]


class Fact(NamedTuple):
    """The facts about a variable of the differentiated function.

    Attributes:
      activation: depends on an argument that is not a parameter.
      varied: depends on a differentiated input.
      linear: depends on a tangent, so the backward computes it instead of the forward.
      random: depends on random numbers.
      bounds: the interval that contains its elements.
      source: the variable with the same elements, perhaps in another shape, as a `Place`.
      above: places whose elements are not larger than this variable's elements.
      shifted: the axes of the maximum, if this is x - max(x), or its exp.
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
    bounds: rules.Interval = rules.ANYWHERE
    source: Place | None = None
    above: frozenset[Place] = frozenset()
    shifted: frozenset[int] = frozenset()
    normalizer: bool = False
    reduced: bool = False
    term: bool = False
    at_hand: bool = False
    exact: bool = False

    def flags(self) -> dict[str, bool]:
        """The facts about the variable's dependencies."""
        return {name: getattr(self, name) for name in ("activation", "varied", "linear", "random")}

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
      named: variables that the policy saves because of a name that they get later.
    """

    of: dict[Any, Fact]
    inside: dict[int, list["Facts"]]
    saved: set[int]
    named: set[Any]

    def read(self, eqn: core.JaxprEqn) -> list[Fact]:
        return [fact_of(self.of, atom) for atom in eqn.invars]


def fact_of(of: Mapping[Any, Fact], atom: Any) -> Fact:
    if isinstance(atom, core.Literal):
        return Fact(bounds=_literal_bounds(atom))
    return of.get(atom, Fact())


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
    of: dict[Any, Fact] = {}
    for var, fact in zip(jaxpr.invars, given, strict=True):
        of[var] = fact._replace(source=fact.source or _place(var), exact=fact.exact or var in exact)
    found, infinite = Facts(of, {}, set(), set()), set[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        read = found.read(eqn)
        bodies = [] if rules.is_known(eqn) else jaxprs.bodies(eqn)
        if bodies:
            results = _inside(found, number, eqn, bodies, policy, exact)
        elif operation(eqn) == "eq" and any(fact.bounds[0] == math.inf for fact in read):
            infinite.add(id(eqn.outvars[0]))
            results = [of_any(read)]
        elif operation(eqn) == "select_n" and id(eqn.invars[0]) in infinite:
            # The bounds come from the operand that is not infinite.
            results = [read[1]._replace(**of_any(read).flags(), exact=are_exact(read))]
        else:
            is_saved = _saves(policy, eqn)
            results = _of_results(eqn, read, is_saved)
            if is_saved and operation(eqn) == "name":
                if read[0].source:
                    found.named.add(read[0].source[0])
            elif is_saved and operation(eqn) not in rules.PASSED:
                found.saved.add(number)
        sources = {fact.source[0] for fact in read if fact.source}
        for var, fact in zip(eqn.outvars, results, strict=True):
            is_known = fact.source and fact.source[0] in sources
            source = fact.source if is_known else _place(var)
            of[var] = fact._replace(source=source, exact=fact.exact or var in exact)
    return found


def _inside(found: Facts, number: int, eqn, bodies, policy: Policy, exact) -> list[Fact]:
    read = [fact_of(found.of, atom) for atom in jaxprs.operands(eqn)]
    is_slice = [
        getattr(a.aval, "shape", None) != getattr(v.aval, "shape", None)
        for a, v in zip(jaxprs.operands(eqn), bodies[0].invars, strict=True)
    ]
    back = jaxprs.carried(eqn, bodies[0])
    if policy is everything_saveable and eqn.primitive.name in ("checkpoint", "remat2"):
        # A `jax.checkpoint` inside saves what it saves without `compress`.
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
        results = [of_any([fact])._replace(bounds=fact.bounds) for fact in results]
    return results


def _of_results(eqn: Any, read: list[Fact], is_saved: bool) -> list[Fact]:
    if not eqn.outvars:
        return []
    name, either = operation(eqn), of_any(read)
    if name in rules.RANDOM:
        either = either._replace(random=True)
    if either.linear:
        return [either] * len(eqn.outvars)
    if name == "optimization_barrier":
        return [fact._replace(source=None, above=frozenset(), shifted=frozenset()) for fact in read]
    first = read[0] if read else Fact()
    passes = name in rules.PASSED
    is_saved = is_saved and (not passes or name == "name")
    own = either._replace(bounds=_bounds(eqn, [fact.bounds for fact in read]))
    places = frozenset(fact.source for fact in read if fact.source)
    if passes and not _narrows(eqn):
        source = next((_moved(eqn, place) for place in places), None)
        above = frozenset(filter(None, (_moved(eqn, place) for place in first.above)))
        own = own._replace(source=source, above=above)
        if source is not None and eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape:
            own = own._replace(shifted=first.shifted if name != "transpose" else frozenset())
    elif name == "reduce_max":
        kept = [i for i in range(eqn.invars[0].aval.ndim) if i not in eqn.params["axes"]]
        own = own._replace(above=frozenset((v, tuple(d[i] for i in kept)) for v, d in places))
    elif name == "logaddexp":
        ndim = eqn.outvars[0].aval.ndim
        own = own._replace(above=frozenset(place for place in places if len(place[1]) == ndim))
    elif name in ("max", "pmax"):
        own = own._replace(above=frozenset[Place]().union(*(fact.above for fact in read)))
    elif name == "sub" and first.source:
        over = _over(read[1].above, first.source)
        if over:
            own = own._replace(bounds=(-math.inf, 0), shifted=over[0])
    elif name == "exp":
        own = own._replace(shifted=first.shifted)
    is_sum = name == "reduce_sum" and bool(first.shifted) and first.bounds == (0, 1)
    over_axes = {i for i in first.shifted if is_sum and eqn.invars[0].aval.shape[i] != 1}
    is_normalizer = is_sum and over_axes <= {*eqn.params["axes"]} and not first.at_hand
    ours = [fact for fact in read if fact.activation]
    scales = len(ours) == 1 and (name == "mul" or (name == "div" and first.activation))
    is_made = passes or scales or name in ("add", "sub")
    near = all(fact.at_hand or fact.reduced for fact in read if fact.lossy) and any(
        fact.at_hand and _size(atom) == _size(eqn.outvars[0])
        for fact, atom in zip(read, eqn.invars, strict=True)
    )
    own = own._replace(
        normalizer=is_normalizer or (passes and first.normalizer),
        reduced=(name in rules.REDUCTIONS and not is_normalizer)
        or (
            rules.is_elementwise(eqn)
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


def _place(var: Any) -> Place:
    return var, tuple(range(len(getattr(var.aval, "shape", ()))))


def _moved(eqn: Any, place: Place) -> Place | None:
    """The place of the elements after an equation that passes them on; None if unknown."""
    name, (var, axes), [x], [y] = operation(eqn), place, eqn.invars[:1], eqn.outvars
    if name == "transpose":
        return var, tuple(axes[i] for i in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        found: list[int | None] = [None] * y.aval.ndim
        for i, to in enumerate(eqn.params["broadcast_dimensions"]):
            found[to] = axes[i] if x.aval.shape[i] == y.aval.shape[to] else None
        return var, tuple(found)
    if x.aval.shape == y.aval.shape:
        return None if name in ("neg", "rev") else place
    long = [axis for axis, size in zip(axes, x.aval.shape, strict=True) if size != 1]
    if [size for size in x.aval.shape if size != 1] != [n for n in y.aval.shape if n != 1]:
        return None
    rest = iter(long)
    return var, tuple(None if size == 1 else next(rest) for size in y.aval.shape)


def _over(maxima: frozenset[Place], other: Place) -> list[frozenset[int]]:
    """For each maximum over elements that include the elements of `other`, the reduced axes."""
    found = []
    for var, axes in maxima:
        is_same = var is other[0] and len(axes) == len(other[1])
        if is_same and all(a in (None, b) for a, b in zip(axes, other[1], strict=True)):
            found.append(frozenset(i for i, axis in enumerate(axes) if axis is None))
    return found


def _saves(policy: Policy, eqn: core.JaxprEqn) -> bool:
    answer = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    if isinstance(answer, Offloadable):
        raise ValueError(
            f"compress: policy: expected a policy that saves or recomputes, got a policy that "
            f"offloads a result of {eqn.primitive} to {answer.dst!r}; use jax.checkpoint to offload"
        )
    return answer not in (False, Recompute)


def _narrows(eqn: Any) -> bool:
    """Whether an equation is a cast to a smaller dtype."""
    if operation(eqn) != "convert_element_type":
        return False
    return eqn.params["new_dtype"].itemsize < eqn.invars[0].aval.dtype.itemsize


def _size(atom: Any) -> Any:
    return math.prod(getattr(atom.aval, "shape", ()))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _corners(
    f: Callable[[float, float], float], a: rules.Interval, b: rules.Interval
) -> rules.Interval:
    values = [f(x, y) for x in a for y in b]
    if any(map(math.isnan, values)):  # inf - inf, 0 * inf
        return rules.ANYWHERE
    return min(values), max(values)


def _even(a: rules.Interval) -> rules.Interval:
    most = max(map(abs, a))
    return (0 if a[0] <= 0 <= a[1] else min(map(abs, a))), most


_UNARY: dict[str, Callable[[rules.Interval], rules.Interval]] = {
    "abs": _even,
    "cos": lambda a: (-1, 1),
    "erf": lambda a: (-1, 1),
    "erfc": lambda a: (0, 2),
    "exp": lambda a: (_exp(a[0]), _exp(a[1])),
    "exp_neg_sq": lambda a: (0, 1),
    "logistic": lambda a: (0, 1),
    "neg": lambda a: (-a[1], -a[0]),
    "sin": lambda a: (-1, 1),
    "square": lambda a: (_even(a)[0] ** 2, _even(a)[1] ** 2),
    "tanh": lambda a: (-1, 1),
}
_SAME = (rules.PASSED - {"neg"}) | {"reduce_max", "reduce_min", "pmax", "pmin", "slice"}


def _bounds(eqn: core.JaxprEqn, given: list[rules.Interval]) -> rules.Interval:
    """The interval of the first result's elements, from the operands' intervals."""
    name = operation(eqn)
    if name in _UNARY:
        return _UNARY[name](given[0])
    if name in _SAME:
        return given[0]
    if name == "integer_pow" and eqn.params["y"] == 2:
        return _UNARY["square"](given[0])
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return _UNARY["square"](given[0])
    if name in ("add", "add_any"):
        return _corners(lambda x, y: x + y, *given)
    if name == "sub":
        return _corners(lambda x, y: x - y, *given)
    if name == "mul":
        return _corners(lambda x, y: x * y, *given)
    if name == "max":
        return max(given[0][0], given[1][0]), max(given[0][1], given[1][1])
    if name == "min":
        return min(given[0][0], given[1][0]), min(given[0][1], given[1][1])
    if name == "logaddexp":
        return max(given[0][0], given[1][0]), math.inf
    if name == "select_n":
        return min(low for low, _ in given[1:]), max(high for _, high in given[1:])
    return rules.ANYWHERE


def _literal_bounds(atom: Any) -> rules.Interval:
    """The interval of a literal."""
    if np.ndim(atom.val) or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
        return rules.ANYWHERE
    return float(atom.val), float(atom.val)
