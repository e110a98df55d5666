"""Traces a function at each call and runs its jaxpr in another way."""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from lowmembp_jax._jax_internals import current_trace, keeps_arrays
from lowmembp_jax.compression.jaxprs import every_equation, without_consts

#: Runs a jaxpr: takes it, the values of its inputs, and which of them are parameters; returns the
#: results.
Bind = Callable[[core.Jaxpr, Sequence[Any], tuple[bool, ...]], list[Any]]


class _Static:
    """The static values of a call, hashed by value if possible, as in `jax.checkpoint`."""

    def __init__(self, tree: Any, places: Sequence[int | None], values: Sequence[Any]):
        self.tree, self.places, self.values = tree, tuple(places), tuple(values)
        values = [v.value if isinstance(v, _Constant) else v for v in values]
        # 1, 1.0 and True are equal, but different static values.
        self.key = tree, self.places, tuple((type(v), _hashable(v)) for v in values)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, _Static) and self.key == other.key


class _Constant:
    """A static argument as a leaf of the tree of arguments."""

    def __init__(self, value: Any):
        self.value = value


@jax.tree_util.register_static
class _Fixed:
    """A part of a traced function's result that is no array, as a part of the result's tree."""

    def __init__(self, value: Any):
        self.value = value


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _is_array(leaf: Any, is_argument: bool) -> bool:
    # A number of a module may decide something. One that is differentiated is a tracer here.
    if isinstance(leaf, bool | int) or (not is_argument and type(leaf) in (float, complex)):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _check_results(fun: Callable[..., Any], results: Any) -> None:
    """Raises JAX's error for a result that is no array. JAX would name this file, and no key."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            code = getattr(inspect.unwrap(fun), "__code__", None)
            at = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
            raise TypeError(
                f"function {getattr(fun, '__name__', type(fun).__name__)}{at} returned a value of "
                f"type {type(leaf)} at output component {jax.tree_util.keystr(path)}, which is not "
                f"a valid JAX type"
            ) from error


def traced_call(
    fun: Callable[..., Any],
    bind: Bind,
    holds_params: Callable[[Any], bool] | None = None,
    closes_over_params: bool = True,
    any_result: bool = False,
    otherwise: Callable[[Exception], None] | None = None,
) -> Callable[..., Any]:
    """Returns a function of `fun`'s arguments and of their positions, which runs `bind`.

    Args:
      bind: runs the jaxpr of `fun`.
      holds_params: whether a node anywhere in the tree of arguments holds parameters.
      closes_over_params: whether the values that `fun` closes over are parameters.
      any_result: whether results may be other things than arrays of JAX, which are returned as they
        are, as by `jax.vjp`.
      otherwise: if given, a function that cannot be traced is called as it is, after a call of
        `otherwise` with the error.

    Returns:
      `call(args, kwargs, params, static)`. `params` holds the positions in `args` of arguments with
      parameters. `static` holds the positions of arguments that are not traced.
    """

    last: Callable[[], Any] = lambda: None  # noqa: E731

    def run(static, *arrays):
        nonlocal last
        last = weakref.ref(current_trace())
        leaves = [
            value if place is None else arrays[place]
            for place, value in zip(static.places, static.values, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(static.tree, leaves)
        args = (arg.value if isinstance(arg, _Constant) else arg for arg in args)
        made = fun(*args, **kwargs)
        if not any_result:
            _check_results(fun, made)
        results, tree = jax.tree.flatten(made)
        others = {
            i: one for i, one in enumerate(results) if any_result and not isinstance(one, jax.Array)
        }
        return [one for i, one in enumerate(results) if i not in others], _Fixed((tree, others))

    run.__name__ = run.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
    traced = jax.make_jaxpr(jax.jit(run, static_argnums=0), static_argnums=0, return_shape=True)

    def call(args, kwargs, params, static):
        args = tuple(_Constant(arg) if i in static else arg for i, arg in enumerate(args))
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        flags = [i in params for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        flags += [False] * (len(leaves) - len(flags))
        if holds_params:
            nodes = jax.tree.leaves((args, kwargs), is_leaf=holds_params)
            flags = [holds_params(node) for node in nodes for _ in jax.tree.leaves(node)]
        given: dict[int, tuple[int, Any, bool]] = {}  # an array that occurs twice is one argument
        places, values = [], []
        for (path, leaf), is_param in zip(paths, flags, strict=True):
            is_traced = _is_array(leaf, is_argument=len(path) == 2)
            if is_traced:
                place, _, before = given.get(id(leaf), (len(given), leaf, False))
                given[id(leaf)] = place, leaf, before or is_param
            places.append(place if is_traced else None)
            values.append(None if is_traced else leaf)
        arrays = [array for _, array, _ in given.values()]
        try:
            closed, (_, fixed) = traced(_Static(tree, places, values), *arrays)
            params = (list(eqn.params.values()) for eqn in every_equation(closed.jaxpr))
            trace = last() if otherwise else None
            if trace is not None and any(keeps_arrays(each, trace) for each in params):
                raise ValueError("it keeps arrays, as in a closure of a custom derivative")
        except Exception as error:
            if otherwise is None:
                raise
            otherwise(error)
            try:
                return fun(*args, **kwargs)
            except Exception as second:  # NNX's functions run only once
                if not isinstance(error, jax.errors.JAXTypeError):
                    raise error from None
                second.add_note(f"The function could not be traced before: {error}")
                raise
        flags = [is_param for *_, is_param in given.values()]
        results = iter(_run(closed, arrays, flags, closes_over_params, bind))
        tree, others = fixed.value
        every = (others[i] if i in others else next(results) for i in range(tree.num_leaves))
        return jax.tree.unflatten(tree, every)

    return call


def _run(
    closed: core.ClosedJaxpr,
    args: Sequence[Any],
    is_param: Sequence[bool],
    closes_over_params: bool,
    bind: Bind,
) -> list[Any]:
    """Runs the traced call of a jitted function."""
    outer = closed.jaxpr
    env = dict(zip((*outer.constvars, *outer.invars), (*closed.consts, *args), strict=True))
    flags = dict(zip(outer.invars, is_param, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    eqn = outer.eqns[0] if [eqn.primitive.name for eqn in outer.eqns] == ["jit"] else None
    if eqn is None:  # under `jax.disable_jit`
        inner, atoms = closed, outer.invars
    else:  # `jax.jit` returns the same trace for later calls with arguments of these types
        inner, atoms = eqn.params["jaxpr"], eqn.invars
    values = [*inner.consts, *map(read, atoms)]
    # Values that are not arguments are closed over.
    given = [closes_over_params] * len(inner.consts)
    given += [
        isinstance(atom, core.Literal) or flags.get(atom, closes_over_params) for atom in atoms
    ]
    results = bind(without_consts(inner.jaxpr), values, tuple(given))
    if eqn is not None:
        env |= zip(eqn.outvars, results, strict=True)
        results = [read(atom) for atom in outer.outvars]
    # The value of a literal is an array of NumPy.
    return [one if isinstance(one, jax.Array) else jnp.asarray(one) for one in results]
