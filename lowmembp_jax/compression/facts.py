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

Policy = Callable[..., Any]


class Place(NamedTuple):
    """The elements of a variable, as another array holds them or is not below them.

    Attributes:
      of: the variable.
      axes: the axis of `of` for each axis of the other array, or None for an axis along which the
        other array is broadcast.
    """

    of: Any
    axes: tuple[int | None, ...]

    @classmethod
    def own(cls, var: Any) -> "Place":
        """The elements of a variable as it has them itself."""
        return cls(var, tuple(range(len(getattr(var.aval, "shape", ())))))

    def along(self, axes: Sequence[int]) -> "Place":
        """The elements after a transposition or a reduction to these axes."""
        return Place(self.of, tuple(self.axes[axis] for axis in axes))


class Fact(NamedTuple):
    """The facts about a variable of the differentiated function.

    Attributes:
      activation: depends on an argument that is not a parameter.
      varied: depends on a differentiated input.
      linear: depends on a tangent, so the backward computes it instead of the forward.
      random: depends on random numbers.
      bounds: the interval that contains its elements.
      root: the elements of another variable that it has, perhaps transposed.
      above: places whose elements are not larger, such as all elements below a maximum.
      shifted: the axes of the maximum, if this is x - max(x), which is not above 0, or its exp.
      unit: is the exp of x - max(x), and therefore between 0 and 1.
      normalizer: is the sum of such an exp over these axes, recomputed from rounded numbers. It is
        at least 1, and its error is in proportion. What a softmax divides by an exact sum would not
        add up to 1, so its backward would not cancel what all its operands share.
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
    root: Place | None = None
    above: frozenset[Place] = frozenset()
    shifted: frozenset[int] | None = None
    unit: bool = False
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
      offloaded: the saved equations whose results wait in the host's memory.
    """

    of: dict[Any, Fact]
    inside: dict[int, list["Facts"]]
    saved: set[int]
    offloaded: set[int]

    def read(self, eqn: core.JaxprEqn) -> list[Fact]:
        return [fact_of(self.of, atom) for atom in eqn.invars]


def fact_of(of: Mapping[Any, Fact], atom: Any) -> Fact:
    if isinstance(atom, core.Literal):
        return Fact(bounds=(float(atom.val), float(atom.val))) if _is_scalar(atom) else Fact()
    return of.get(atom, Fact())


def _is_scalar(atom: Any) -> bool:
    """Whether a literal is one floating number, and not NaN."""
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return atom.aval.shape == () and is_float and atom.val == atom.val


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
    found = Facts({}, {}, set(), set())
    for var, fact in zip(jaxpr.invars, given, strict=True):
        found.of[var] = fact._replace(
            root=fact.root or Place.own(var), exact=fact.exact or var in exact
        )
    compared: dict[Any, Any] = {}  # by the result of `x == inf`, the root of x
    for number, eqn in enumerate(jaxpr.eqns):
        bodies = [] if rules.is_known(eqn) else jaxprs.bodies(eqn)
        if bodies:
            results = _inside(found, number, eqn, bodies, policy, exact)
            # Two calls may share a body, so only roots outside it tell variables apart.
            roots = {fact.root.of for fact in found.read(eqn) if fact.root}
            results = [
                f if f.root and f.root.of in roots else f._replace(root=None) for f in results
            ]
        else:
            is_saved, is_offloaded = _answer(policy, eqn)
            read = found.read(eqn)
            if _is_normalizer(eqn, read) or _is_normalized(eqn, read):
                is_saved = is_offloaded = False  # the sum of stored numbers is another number
            if is_saved:
                found.saved.add(number)
            if is_offloaded:
                found.offloaded.add(number)
            results = _of_results(eqn, read, is_saved)
            if operation(eqn) == "eq" and _is_infinity(eqn.invars[1]):
                compared[Place.own(eqn.outvars[0])] = read[0].root
            # JAX replaces infinite numbers of x by 0 before it subtracts.
            x = read[1] if operation(eqn) == "select_n" else Fact()
            if x.root is not None and compared.get(read[0].root) == x.root:
                results = [results[0]._replace(root=x.root, above=x.above)]
        for var, fact in zip(eqn.outvars, results, strict=True):
            found.of[var] = fact._replace(
                root=fact.root or Place.own(var), exact=fact.exact or var in exact
            )
    return found


def _is_infinity(atom: Any) -> bool:
    return isinstance(atom, core.Literal) and _is_scalar(atom) and atom.val == np.inf


def _inside(found: Facts, number: int, eqn, bodies, policy: Policy, exact) -> list[Fact]:
    read = [fact_of(found.of, atom) for atom in jaxprs.operands(eqn)]
    is_slice = [
        getattr(a.aval, "shape", None) != getattr(v.aval, "shape", None)
        for a, v in zip(jaxprs.operands(eqn), bodies[0].invars, strict=True)
    ]
    back = jaxprs.carried(eqn, bodies[0])
    if eqn.primitive.name in ("checkpoint", "remat2") and _answer(policy, eqn)[0]:
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
        results = [facts[0] if len(facts) == 1 else _of_either(facts) for facts in every]
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
        results = [of_any([fact, index])._replace(bounds=fact.bounds) for fact in results]
    if eqn.primitive.name in ("scan", "shard_map"):
        results = [of_any([fact])._replace(unit=fact.unit, bounds=fact.bounds) for fact in results]
    return results


def _of_either(facts: Sequence[Fact]) -> Fact:
    """The fact of a value that is one of several."""
    return of_any(facts)._replace(bounds=_hull([fact.bounds for fact in facts]))


def _of_results(eqn: Any, read: list[Fact], is_saved: bool) -> list[Fact]:
    if not eqn.outvars:
        return []
    rule, either = rules.rule(eqn), of_any(read)
    either = either._replace(random=either.random or rule.random)
    if either.linear:
        return [either] * len(eqn.outvars)
    if operation(eqn) == "optimization_barrier":
        return [fact._replace(root=None, above=frozenset(), shifted=None) for fact in read]
    first = read[0] if read else Fact()
    is_saved = is_saved and (not rule.passes or operation(eqn) == "name")
    ours = [fact for fact in read if fact.activation]
    scales = len(ours) == 1 and (
        operation(eqn) == "mul" or (operation(eqn) == "div" and first.activation)
    )
    is_made = rule.passes or scales or operation(eqn) in ("add", "sub")
    near = (rule.elementwise or rule.passes) and any(
        fact.at_hand and _size(atom) == _size(eqn.outvars[0])
        for fact, atom in zip(read, eqn.invars, strict=True)
    )
    near = near and all(fact.at_hand or fact.reduced for fact in read if fact.lossy)
    axes = _axes(eqn) if rule.passes else None
    shifted = first.shifted if operation(eqn) in ("exp", "exp2") else None
    if axes is not None and first.shifted is not None:
        shifted = frozenset(i for i, axis in enumerate(axes) if axis in first.shifted)
    if operation(eqn) == "sub" and first.root:
        shifted = _shifted(first.root, read[1].above)
    is_exp = operation(eqn) in ("exp", "exp2") and bool(shifted)
    bounds = _bounds(eqn, [fact.bounds for fact in read])
    if operation(eqn) == "sub" and shifted is not None:
        bounds = -math.inf, 0.0
    is_normalizer = _is_normalizer(eqn, read)
    own = either._replace(
        bounds=bounds,
        root=first.root.along(axes) if first.root and axes is not None else None,
        above=_above(eqn, read),
        shifted=shifted,
        unit=is_exp or (rule.passes and operation(eqn) != "neg" and first.unit),
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


def _is_normalizer(eqn: Any, read: list[Fact]) -> bool:
    """Whether an equation sums the exp of x - max(x) over the axes of the maximum."""
    if operation(eqn) != "reduce_sum" or not read[0].unit or not read[0].shifted:
        return False
    return read[0].shifted <= {*eqn.params["axes"]}


def _is_normalized(eqn: Any, read: list[Fact]) -> bool:
    """Whether an equation computes a softmax, or a function of its divisor alone."""
    lossy = [fact for fact in read if fact.lossy]
    is_known = rules.is_cheap(eqn) and all(fact.normalizer or fact.unit for fact in lossy)
    return is_known and any(fact.normalizer for fact in lossy)


def are_exact(read: Sequence[Fact]) -> bool:
    """Whether an equation reads lossy values, and all of them are exact."""
    lossy = [fact for fact in read if fact.lossy]
    return bool(lossy) and all(fact.exact for fact in lossy)


def _bounds(eqn: Any, given: list[rules.Interval]) -> rules.Interval:
    """The interval of the first result's elements, from the operands' intervals."""
    name, rule = operation(eqn), rules.rule(eqn)
    if not given or jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating):
        return rules.ANYWHERE
    a, b = given[0], given[-1]
    is_square = name == "mul" and eqn.invars[0] is eqn.invars[1]
    is_even = name == "integer_pow" and eqn.params["y"] % 2 == 0
    match name:
        case "exp":
            return math.exp(min(a[0], 700)), math.exp(a[1]) if a[1] < 700 else math.inf
        case "neg":
            return -a[1], -a[0]
        case "select_n":
            return _hull(given[1:])
        case "add" | "add_any":
            return _interval(a[0] + b[0], a[1] + b[1])
        case "sub":
            return _interval(a[0] - b[1], a[1] - b[0])
        case "mul" if not is_square:
            return _interval(*(0.0 if 0 in (x, y) else x * y for x in a for y in b))
        case "max" | "logaddexp":
            return max(a[0], b[0]), max(a[1], b[1]) if name == "max" else math.inf
        case "min":
            return min(a[0], b[0]), min(a[1], b[1])
        case "erf" | "sin" | "cos" | "tanh":
            return -1.0, 1.0
        case "logistic" | "exp_neg_sq":
            return 0.0, 1.0
    if rule.positive or is_square or is_even:
        return 0.0, math.inf
    if name in ("div", "reduce_sum") and a[0] >= 0 and (name == "reduce_sum" or b[0] >= 0):
        return 0.0, math.inf
    is_same = rule.passes or name in ("reduce_max", "reduce_min", "pmax", "pmin", "slice")
    return a if is_same else rules.ANYWHERE


def _interval(*ends: float) -> rules.Interval:
    return rules.ANYWHERE if any(map(math.isnan, ends)) else (min(ends), max(ends))


def _hull(intervals: Sequence[rules.Interval]) -> rules.Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _axes(eqn: Any) -> Sequence[int] | None:
    """The axes of the operand of an equation that only transposes it, or leaves it in place."""
    if operation(eqn) == "transpose":
        return eqn.params["permutation"]
    is_same = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    is_permuted = bool(eqn.params.get("dimensions"))  # of `rev`, and of `lax.reshape`
    if not is_same or is_permuted or operation(eqn) == "neg":
        return None
    return range(len(eqn.outvars[0].aval.shape))


def _above(eqn: Any, read: Sequence[Fact]) -> frozenset[Place]:
    """The places whose elements the first result bounds from above."""
    name, ndim = operation(eqn), len(eqn.outvars[0].aval.shape)
    if name == "reduce_max" and read[0].root:
        axes = range(len(eqn.invars[0].aval.shape))
        kept = [axis for axis in axes if axis not in eqn.params["axes"]]
        return frozenset((read[0].root.along(kept),))
    if name in ("logaddexp", "max", "pmax"):
        own = (fact.root for fact in read if fact.root and len(fact.root.axes) == ndim)
        return frozenset(own).union(*(fact.above for fact in read))
    if not rules.rule(eqn).passes or name == "neg" or not read[0].above:
        return frozenset()
    if name == "broadcast_in_dim":
        shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        to: list[int | None] = [None] * ndim
        for i, axis in enumerate(eqn.params["broadcast_dimensions"]):
            to[axis] = i if shape[i] == new[axis] else None
        return frozenset(
            Place(of, tuple(None if i is None else axes[i] for i in to))
            for of, axes in read[0].above
        )
    axes = _axes(eqn)
    return frozenset() if axes is None else frozenset(p.along(axes) for p in read[0].above)


def _shifted(root: Place, above: frozenset[Place]) -> frozenset[int] | None:
    """The axes over which the maximum is taken, if one of its places has the root's elements."""
    for of, axes in above:
        pairs = list(zip(axes, root.axes, strict=False))
        if of is root.of and len(axes) == len(root.axes) and all(a in (None, b) for a, b in pairs):
            return frozenset(i for i, axis in enumerate(axes) if axis is None)
    return None


def _answer(policy: Policy, eqn: core.JaxprEqn) -> tuple[bool, bool]:
    """Whether the policy saves an equation's results, and whether it offloads them."""
    answer = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    if isinstance(answer, Offloadable):
        if (answer.src, answer.dst) != ("device", "pinned_host"):
            raise ValueError(
                f"compress: policy: expected a policy that offloads to 'pinned_host', "
                f"got one that offloads a result of {eqn.primitive} from {answer.src!r} to "
                f"{answer.dst!r}"
            )
        return True, True
    return answer not in (False, Recompute), False


def _size(atom: Any) -> Any:
    return math.prod(getattr(atom.aval, "shape", ()))
