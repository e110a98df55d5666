"""`lm.compress`: `jax.checkpoint` that stores its residuals in fewer bits."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from lowmembp_jax._arguments import as_choice, as_items, is_inexact
from lowmembp_jax._contexts import is_exact, is_for_tpu
from lowmembp_jax._messages import warn
from lowmembp_jax.compression._layers import is_whole_model
from lowmembp_jax.compression._marks import Marker
from lowmembp_jax.compression._primitive import How, Input, Saved
from lowmembp_jax.compression._traced_call import traced_call
from lowmembp_jax.compression.formats import format_names
from lowmembp_jax.policies import products_saveable

StorageFormat = jax.typing.DTypeLike | Mapping[str | None, jax.typing.DTypeLike | None] | None


class Options(NamedTuple):
    """The checked options of `compress`."""

    formats: Mapping[str | None, str | None]  # see `format_names`
    policy: Callable[..., Any]
    prevent_cse: bool
    offload: bool


def check_options(
    name: str, dtype: StorageFormat, policy: Any, prevent_cse: Any = True, offload: Any = None
) -> Options:
    """Checks the options of the function `name`; raises the errors of `compress`."""
    formats = format_names(dtype, f"{name}: dtype")
    policy = jax.checkpoint_policies.nothing_saveable if policy is None else policy
    if not callable(policy):
        raise TypeError(f"{name}: policy: expected a callable, got {policy!r}")
    barriers = jax.tree.leaves(prevent_cse)
    if not barriers or not all(isinstance(one, bool) for one in barriers):
        found = repr(prevent_cse)
        raise TypeError(f"{name}: prevent_cse: expected a tree of True and False, got {found}")
    if offload is not None:
        as_choice(offload, f"{name}: offload", ("pinned_host",))
    return Options(formats, policy, any(barriers), offload is not None)


def compress(
    fun: Callable[..., Any] | None = None,
    *,
    dtype: StorageFormat = "float8",
    policy: Callable[..., Any] | None = products_saveable,
    params_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: Any = True,
    offload: Literal["pinned_host"] | None = None,
) -> Callable[..., Any]:
    """Stores the residuals of `fun` in 8 bits; otherwise it behaves as `jax.checkpoint`.

        block = lm.compress(block)
        x = block(params, x)         # the parameters first: they are never rounded

    The first argument holds the parameters; `params_argnums` selects other positions. All other
    arguments are activations, which are stored in 8 bits. Arrays that `fun` closes over are
    parameters.

    Wrap each block of a model, as with `jax.checkpoint`, instead of the whole model. While the
    backward of a block runs, all residuals of this block are in memory in their own dtype.

    `policy` says which results are saved. Each saved array that the backward needs is stored once,
    in `dtype`, and everything else is recomputed from the stored arrays. The forward is exact.
    Gradients have only the rounding error of the stored arrays. These arrays are never rounded:

    - parameters, and values computed only from parameters or from undifferentiated values;
    - discrete choices (`top_k`, comparisons, branches), with booleans in 2 bits;
    - arrays that the backward reads as a divisor, in a function whose slope has no bound, such as
      `log`, as queries or keys of an attention kernel, or in a primitive that this library does
      not know.

    cuDNN's attention runs again from rounded values, as with
    `jax.checkpoint_policies.dots_saveable`.

    Args:
      fun: any function that JAX can differentiate, or a callable pytree such as an Equinox module,
        whose arrays are parameters. Without it, `compress` is a decorator with arguments.
      dtype: the format in which residuals are stored. "float8", the default, works at any scale
        and offset. It stores an array that the function normalizes by the rows of the norm; every
        other array has a power of two as the scale of each row of its last axis, from the row's
        exact maximum (E8M0, OCP Microscaling Formats). Nothing is clipped. "int8" has a
        scale for each row of the last axis. "int4" has a scale and a minimum for each group of 32
        or more, and rounds at random. "unscaled_float8_e4m3fn" clips at +-448 and flushes values
        under 0.001 to zero; "unscaled_float8_e5m2" has the range of float16 and two mantissa bits.
        None stores residuals unrounded. A mapping from `checkpoint_name` to formats stores array by
        array; its key None stands for all other arrays, which are unrounded without it. A format
        for a name applies even if the rules above would not round the array. You can also pass the
        dtypes of these formats.
      policy: which results are saved, as in `jax.checkpoint`. `lm.everything_saveable` saves what
        JAX saves by itself; None, or `jax.checkpoint_policies.nothing_saveable`, saves only the
        arguments.
      params_argnums: positions of the arguments that hold parameters, counted as in
        `static_argnums`; `()` if there are none.
      static_argnums: positions of arguments that are not traced, as in `jax.checkpoint`. Leaves
        that are neither arrays nor floats, such as `deterministic=True`, are never traced.
      prevent_cse: as in `jax.checkpoint`. False is safe, and faster, inside a `lax.scan` that is
        not unrolled as a whole; elsewhere XLA would keep the arrays instead of their stored copies.
        One True in a tree for the arguments counts for all of them.
      offload: "pinned_host" moves each array that is stored to the host's memory, and back for the
        backward. With `policy=None` this is first of all the activations among the arguments. A
        policy that offloads does this for the results that it offloads.

    Returns:
      A function of the same arguments, with the values of `jax.checkpoint(fun, policy=policy)`. It
      composes with jit, vmap, scan, `jax.checkpoint` and shardings. `jax.jvp` of it is exact. If
      calls are nested, the outermost decides what is stored and how.

    Warns:
      UserWarning: every argument holds parameters, so nothing is stored in fewer bits; an argument
        that is not in `params_argnums` is a tree of several arrays, which may be parameters;
        `dtype` names an array that is not stored.

    Raises:
      ValueError: `dtype` is not a format; `policy` offloads to another memory than "pinned_host"
        (this error comes when `fun` is differentiated); a position is out of range, or both static
        and a parameter.
      TypeError: `fun` or `policy` is not callable; `fun` is a class or a Flax module.
      NotImplementedError: a second derivative is used.
    """
    options = check_options("compress", dtype, policy, prevent_cse, offload)
    if fun is None:
        return functools.partial(
            compress, dtype=dtype, policy=policy, params_argnums=params_argnums,
            static_argnums=static_argnums, prevent_cse=prevent_cse, offload=offload,
        )  # fmt: skip
    _check_function(fun)
    params = positions("compress", "params_argnums", params_argnums)
    static = positions("compress", "static_argnums", static_argnums)
    if not jax.tree_util.all_leaves([fun]):
        return _of_pytree(fun, options, static)
    name = getattr(fun, "__name__", type(fun).__name__)
    call, warned = stored(fun, options, f"lm.compress({name})"), False

    @functools.wraps(fun)
    def compressed(*args, **kwargs):
        nonlocal warned
        is_static = in_range("compress", "static_argnums", static, args)
        is_param = in_range("compress", "params_argnums", params, args) if args or kwargs else set()
        if both := is_static & is_param:
            raise ValueError(
                f"compress: params_argnums={params_argnums!r} and static_argnums="
                f"{static_argnums!r} both hold {', '.join(map(str, sorted(both)))}: name the "
                f"arguments that hold parameters in params_argnums, or () if there are none"
            )
        if not warned:
            warned = _warn(name, args, kwargs, is_param, is_static)
        return call(args, kwargs, is_param, is_static)

    return compressed


def _check_function(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"compress: fun: expected a function, got {fun!r}")
    kind = fun if isinstance(fun, type) else type(fun)
    module = next((base.__module__ for base in kind.__mro__ if base.__name__ == "Module"), "")
    if module.startswith("flax.nnx"):
        raise TypeError(
            f"compress: fun: got the NNX module {kind.__name__}; write "
            f"lm.nnx.compress(lambda module, x: module(x))(module, x), or decorate its __call__ "
            f"with @lm.nnx.compress"
        )
    if module.startswith("flax.linen") or isinstance(fun, type):
        raise TypeError(
            f"compress: fun: got the class {kind.__name__}; wrap linen modules with "
            f"lm.compress_module({kind.__name__}), or wrap a function that calls the instance"
        )


def _of_pytree(module: Any, options: Options, static: Sequence[int]) -> Callable[..., Any]:
    """Compresses a callable pytree: its arrays are parameters, its arguments are activations."""
    call = stored(
        lambda module, /, *args, **kwargs: module(*args, **kwargs),
        options,
        f"lm.compress({type(module).__name__})",
    )

    def compressed(*args, **kwargs):
        is_static = {i + 1 for i in in_range("compress", "static_argnums", static, args)}
        return call((module, *args), kwargs, {0}, is_static)

    return compressed


def positions(function: str, name: str, argnums: int | Iterable[int]) -> tuple[int, ...]:
    """Converts the argument `name` of a function to positions, which may be negative.

    Raises:
      TypeError: they are not integers.
    """
    given = as_items(argnums)
    try:
        if any(isinstance(one, bool) for one in given):
            raise TypeError
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(
            f"{function}: {name}: expected an int or a sequence of ints, got {argnums!r}"
        ) from None


def in_range(function: str, name: str, positions: Sequence[int], args: Sequence[Any]) -> set[int]:
    """Converts positions in `args` to non-negative positions.

    Raises:
      ValueError: a position is out of range.
    """
    for one in positions:
        if not -len(args) <= one < len(args):
            raise ValueError(
                f"{function}: {name}: expected positions of the {len(args)} positional arguments "
                f"of the call, got {one}" + ("" if args else ", where the call has keywords alone")
            )
    return {one % len(args) for one in positions}


def _warn(name, args, kwargs, is_param, is_static) -> bool:
    """Warns about arguments that probably count as the wrong kind; returns whether it did."""
    traced = {i: arg for i, arg in enumerate(args) if i not in is_static} | kwargs
    arrays = {
        i: [leaf for leaf in jax.tree.leaves(arg) if is_inexact(leaf)] for i, arg in traced.items()
    }
    others = [i for i in arrays if i not in is_param and arrays[i]]
    if is_param and not others and any(arrays.values()):
        warn(
            f"compress: every array that {name} gets is a parameter, so nothing is stored in fewer "
            f"bits; params_argnums=() makes the first argument an activation"
        )
        return True
    trees = [i for i in others if len(arrays[i]) > 1]
    if trees:
        at = ", ".join(f"{i!r}" for i in trees)
        warn(
            f"compress: argument {at} of {name} is a tree of several arrays, which are stored as "
            f"activations; if they are parameters, name the position in params_argnums"
        )
    return bool(trees)


def stored(
    fun: Callable[..., Any],
    options: Options,
    owner: str,
    holds_params: Callable[[Any], bool] | None = None,
) -> Callable[..., Any]:
    """Compresses `fun`; returns a function of its arguments and of their positions.

    Args:
      owner: the function's name in errors.
      holds_params: see `traced_call`, which also describes the result.
    """
    hows: dict[Any, How] = {}

    def bind(jaxpr, values, is_param):
        formats = {} if is_exact() else options.formats
        key = is_param, is_exact(), is_for_tpu()
        if key not in hows:
            if not hows and is_whole_model(jaxpr, is_param):
                warn(
                    f"{owner} holds a whole model: compress each block, or the body of the scan, "
                    f"instead, which takes less memory, above all with policy=None"
                )
            inputs = tuple(Input.PARAMETER if one else Input.ACTIVATION for one in is_param)
            offload = options.offload and not is_exact()
            marker = Marker(options.policy, formats, owner, offload)
            # What waits in the host's memory does not count.
            saved = None if offload else Saved(warns=True)
            hows[key] = How(marker, inputs, options.prevent_cse, saved)
        return hows[key].bind(values, jaxpr)

    return traced_call(fun, bind, holds_params)
