"""Random keys among the inputs of a traced function, and draws that do not depend on them."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import jaxprs, rules


def is_typed_key(x: Any) -> bool:
    """Whether an array, or a type of an array, has keys as `jax.random.key` makes them."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def may_be_key(x: Any) -> bool:
    """Whether an array may be a legacy key of `jax.random.PRNGKey`, or an array of them."""
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    return x.dtype == jnp.uint32 and x.shape[-1:] == words


def folded(keys: Any, number: Any) -> Any:
    """Folds a number into a key, or into each key of an array of keys, typed or legacy."""
    if not is_typed_key(keys):
        return jax.random.key_data(folded(jax.random.wrap_key_data(keys), number))
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, number)


def key_inputs(jaxpr: core.Jaxpr) -> set[int]:
    """The numbers of the inputs that are typed keys, or legacy keys that the function uses."""
    none, legacy = frozenset[int](), set[int]()

    def through(eqn, read):
        every = none.union(*read)
        if operation(eqn) == "random_wrap":
            legacy.update(every)
        return every

    types = [var.aval for var in jaxpr.invars]
    given = [frozenset([i]) if may_be_key(x) else none for i, x in enumerate(types)]
    jaxprs.follow(jaxpr, given, through, lambda each: none.union(*each))
    return legacy | {i for i, x in enumerate(types) if is_typed_key(x)}


def draws_without(jaxpr: core.Jaxpr, inputs: Container[int]) -> bool:
    """Whether the function draws random numbers that depend on none of these inputs."""
    found = []

    def is_draw(eqn):
        reads = any(is_typed_key(atom.aval) for atom in eqn.invars)
        keeps = operation(eqn) == "random_unwrap" or any(is_typed_key(v.aval) for v in eqn.outvars)
        return rules.rule(eqn).random or (reads and not keeps)

    def through(eqn, read):
        if not any(read) and (is_draw(eqn) or any(map(is_draw, jaxprs.every_inside(eqn)))):
            found.append(eqn)
        return any(read)

    given = [i in inputs for i in range(len(jaxpr.invars))]
    jaxprs.follow(jaxpr, given, through, any)
    return bool(found)
