"""Exact forward, residuals in 8 bits: for any function.

The forward is that of `jax.checkpoint(fun, policy=policy)`. The arrays that it keeps are stored in
a narrower dtype until the backward reads them, so gradients have their rounding error. Nothing is
computed again that the policy alone would not compute again.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowmembp_jax.arrays import call_custom_vjp
from lowmembp_jax.checkpointing import products_saveable
from lowmembp_jax.storage import check_storage
from lowmembp_jax.stored_residuals import with_stored_residuals

StorageDtype = jax.typing.DTypeLike | Mapping[str | None, jax.typing.DTypeLike | None] | None


def compress(
    fun: Callable[..., Any],
    *,
    dtype: StorageDtype = jnp.float8_e4m3fn,
    policy: Callable[..., Any] | None = products_saveable,
    params_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`fun` with the same values, whose backward reads residuals stored in `dtype`.

        block = lm.compress(block)          # block(params, x)
        x = block(params, x)

    Used like `jax.checkpoint`, around each block of a model and not around the whole of it: the
    backward of a block has all of its residuals in their own dtype for as long as it runs.

    Stored in `dtype` are the floating arrays that the backward needs, each once: results that
    `policy` keeps, of a sum of two the sum, and the activations among the arguments. As they are
    stay parameters and what is computed from them alone, what depends on nothing that is
    differentiated, integers, keys, scalars, arrays 64 times smaller than the largest of
    those stored, statistics of rows such as the logsumexp of attention, the outputs of this
    library's norms that the backward divides by their scale (see `ms_layer_norm`), and what takes
    no less with its scales, such as rows of 2 numbers in int8. Booleans that the forward makes take
    2 bits.

    Args:
      fun: any function that JAX can differentiate. Arrays that it closes over are parameters.
      dtype: of what is stored. `float8_e4m3fn`: values beyond +-448 are clipped to it and those
        under 0.001 become 0, in the residual only. A model with larger activations takes
        `float8_e5m2`, of two mantissa bits: in a test with a channel at 5,000 the loss is that of
        exact gradients, and 15% above it with `float8_e4m3fn`. One with small ones, such as inputs
        in physical units that no norm scales, takes `int8` or `float8_e5m2`. `int8`: a scale a row
        of the last axis. `int4`: a scale and a least value a group of 32 or more, rounded at
        random. None: as they are. A mapping from `checkpoint_name` to one of these, with None as
        the key for all other arrays; what it does not name is stored as it is. The name must be
        that of what is kept: let `policy` save it.
      policy: what is kept, as in `jax.checkpoint`; besides it what is chosen by value, such as
        `top_k`'s experts, for ReLU the side of 0 that an element is on, and the activations that
        max pooling, `log`, `sin`, `cos`, `floor`, `ceil` and `rem` read, in their own dtype. None:
        what the operators of `fun` keep by themselves.
        `jax.checkpoint_policies.nothing_saveable`: the arguments alone.
      params_argnums: positions of the arguments that are parameters, never quantised; `()` where
        the first argument is an activation, which would be kept as it is otherwise.
      static_argnums: positions of arguments that are not traced. Leaves that are no arrays, such
        as `deterministic=True`, are never traced.

    Returns:
      A function of the same arguments. Its values are those of `jax.checkpoint(fun,
      policy=policy)`; gradients are approximate. It composes with jit, vmap, scan, `jax.checkpoint`
      and shardings. Forward-mode and second-order differentiation are not defined.

    Warns:
      UserWarning: no argument is an activation, so that there is nothing to store; `dtype` has a
        name of which nothing is kept.

    Raises:
      ValueError: `dtype` is no storage format; a position is negative, or that of a parameter and
        static; a parameter is not given by position; `policy` offloads, which is seen where `fun`
        is differentiated.
      TypeError: `fun` or `policy` is not callable; `fun` is a class; a key of `dtype` is no name.
      NotImplementedError: a second derivative was asked for.
    """
    for key, given in dtype.items() if isinstance(dtype, Mapping) else [(None, dtype)]:
        if not isinstance(key, str | None):
            raise TypeError(f"compress: keys of dtype must be names or None, got {key!r}")
        check_storage(given, "dtype" if key is None else f"dtype[{key!r}]")
    for name, given in (("fun", fun), ("policy", policy)):
        if not callable(given) and (given is not None or name == "fun"):
            raise TypeError(f"compress: {name} must be callable, got {given!r}")
    if isinstance(fun, type):
        raise TypeError(
            f"compress: fun must be a function, got the class {fun.__name__}: a class of modules "
            f"is given to compress_module, and an object is called in a function"
        )
    dtypes = dtype if isinstance(dtype, Mapping) else {None: dtype}
    params = positions("compress: params_argnums", params_argnums)
    static = positions("compress: static_argnums", static_argnums)
    if both := params & static:
        raise ValueError(
            f"compress: static_argnums={static_argnums!r} and params_argnums={params_argnums!r} "
            f"both have {', '.join(map(str, sorted(both)))}: name the arguments that are "
            f"parameters in params_argnums, or they are rounded; () if there are none"
        )

    @functools.wraps(fun)
    def compressed(*args, **kwargs):
        split = [((), arg) if i in static else (arg, ()) for i, arg in enumerate(args)]
        traced, untraced = [a for a, _ in split], [a for _, a in split]
        paths, tree = jax.tree.flatten_with_path((traced, kwargs))
        leaves = [leaf for _, leaf in paths]
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
        name = getattr(fun, "__name__", type(fun).__name__)
        if arrays and params and max(params) >= len(args):
            raise ValueError(
                f"compress: params_argnums={params_argnums!r}, and {name} was called with "
                f"{len(args)} positional arguments: accepted are positions of these, or ()"
            )
        # Paths begin with 0, and the position, for positional arguments.
        is_param = [paths[i][0][0].idx == 0 and paths[i][0][1].idx in params for i in arrays]

        def run(*values):
            filled = list(leaves)
            for i, value in zip(arrays, values, strict=True):
                filled[i] = value
            positional, named = jax.tree.unflatten(tree, filled)
            every = enumerate(zip(positional, untraced, strict=True))
            return fun(*(no if i in static else yes for i, (yes, no) in every), **named)

        if arrays and all(is_param):
            warnings.warn(
                f"compress: every array that {name} is given is a parameter, and nothing is stored "
                f"in fewer bits; params_argnums=() makes the first argument an activation",
                stacklevel=2,
            )
        values = [leaves[i] for i in arrays]
        closed, shape = jax.make_jaxpr(run, return_shape=True)(*values)
        is_param = [True] * len(closed.consts) + is_param
        call = with_stored_residuals(closed.jaxpr, policy, dtypes, is_param, name)
        results = call_custom_vjp(f"lm.compress({name})", call, *closed.consts, *values)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return compressed


def positions(name: str, argnums: int | Iterable[int], least: int = 0) -> frozenset[int]:
    """Positions of arguments, from `least` on.

    Raises:
      ValueError: `argnums` is something else; `name` is the function's and the argument's.
    """
    given = argnums if isinstance(argnums, Iterable) else [argnums]
    try:
        found = [-1 if isinstance(one, bool) else operator.index(one) for one in given]
    except TypeError:
        found = [-1]
    if any(position < least for position in found):
        raise ValueError(f"{name} must be positions from {least} on, got {argnums!r}")
    return frozenset(found)
