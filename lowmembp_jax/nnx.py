"""The operators for Flax NNX: `lm.nnx`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from flax import nnx
from flax.nnx import extract
from jaxtyping import Array, Bool, Float

from lowmembp_jax import compression
from lowmembp_jax._arguments import real_array
from lowmembp_jax._flax_norms import check_norm, normalize_as
from lowmembp_jax.compression import StorageFormat
from lowmembp_jax.kernels.implementations import check_implementation
from lowmembp_jax.operators.activations import regelu2, resilu2
from lowmembp_jax.policies import products_saveable
from lowmembp_jax.tiles import check_slices, tiled_call


class ReGELU2(nnx.Module):
    """`lm.regelu2` as a module.

    Attributes:
      approximate: the tanh form (True) or the erf form.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    def __init__(self, approximate: bool = True, *, implementation: str | None = None):
        check_implementation(implementation)
        self.approximate, self.implementation = approximate, implementation

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return regelu2(x, self.approximate, implementation=self.implementation)


class ReSiLU2(nnx.Module):
    """`lm.resilu2` as a module.

    Attributes:
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    def __init__(self, *, implementation: str | None = None):
        check_implementation(implementation)
        self.implementation = implementation

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return resilu2(x, implementation=self.implementation)


class _KeepsOutput:
    """Adds the arguments `residual` and `implementation` to a norm of NNX."""

    def __init__(
        self,
        *args: Any,
        residual: str = "auto",
        implementation: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.residual, self.implementation = residual, implementation
        check_norm(self)


class MSLayerNorm(_KeepsOutput, nnx.LayerNorm):
    """`nnx.LayerNorm`, differentiated from its output: see `lm.ms_layer_norm`.

    It has the arguments, parameters and state of `nnx.LayerNorm`, and two more arguments.

    Args:
      residual: "auto", "normalized" or "output": which array to save if there is a scale or bias.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Raises:
      ValueError: for `axis_name` and `axis_index_groups`; at the call for a `mask` that does not
        broadcast to x.
    """

    def __call__(
        self, x: Float[Array, "*shape"], *, mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "*shape"]:
        return apply_norm(self, self, x, mask, center=True)


class MSRMSNorm(_KeepsOutput, nnx.RMSNorm):
    """`nnx.RMSNorm`, differentiated from its output: see `lm.ms_rms_norm`.

    It has the arguments, parameters and state of `nnx.RMSNorm`. The added arguments and the errors
    are the same as for `MSLayerNorm`.
    """

    def __call__(
        self, x: Float[Array, "*shape"], mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "*shape"]:
        return apply_norm(self, self, x, mask, center=False)


def apply_norm(fields: Any, holder: Any, x: Array, mask: Array | None, center: bool) -> Array:
    """Calls `normalize` with the fields of a norm and the scale and bias of `holder`."""
    params = (getattr(holder, name, None) for name in ("scale", "bias"))
    scale, bias = (None if param is None else param[...] for param in params)
    # NNX rounds x and the parameters to the dtype first; linen rounds only the result.
    x, *given = fields.promote_dtype(
        (real_array(x), *(p for p in (scale, bias) if p is not None)), dtype=fields.dtype
    )
    rest = iter(given)
    scale, bias = (None if p is None else next(rest) for p in (scale, bias))
    return normalize_as(fields, x, scale, bias, mask, center)


def compress(
    function: Any = None,
    *,
    dtype: StorageFormat = "float8",
    policy: Callable[..., Any] | None = products_saveable,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: Any = True,
    offload: Literal["pinned_host"] | None = None,
) -> Any:
    """Compresses a function of NNX modules and other arguments, as `lm.compress` does.

        y = lm.nnx.compress(lambda block, x: block(x))(block, x)

        class Block(nnx.Module):
            @lm.nnx.compress
            def __call__(self, x): ...

    All variables of all modules among the arguments are parameters: they are never rounded. All
    other arrays are activations. As with `nnx.remat`, the function may write into modules:
    statistics, counts of random numbers and new variables.

    Args:
      function: a function of modules and arrays, or a bound method of a module. Without it,
        `compress` is a decorator with arguments.
      dtype: see `lm.compress`.
      policy: see `lm.compress`.
      static_argnums: positions of arguments that are not traced. Arguments that are neither arrays
        nor floats are never traced.
      prevent_cse: see `lm.compress`.
      offload: see `lm.compress`.

    Raises:
      ValueError, TypeError: see `lm.compress`.
    """
    if function is None:
        return functools.partial(
            compress, dtype=dtype, policy=policy, static_argnums=static_argnums,
            prevent_cse=prevent_cse, offload=offload,
        )  # fmt: skip
    options = compression.check_options("nnx.compress", dtype, policy, prevent_cse, offload)
    name = f"lm.nnx.compress({getattr(function, '__name__', type(function).__name__)})"

    def stored(pure):
        return compression.stored(pure, options, name, _holds_module)

    return _on_modules("nnx.compress", function, static_argnums, stored)


def tile(
    function: Any = None,
    *,
    axis: int,
    size: int,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Calls a function of NNX modules on slices of its activations, as `lm.tiled` does.

        y = lm.nnx.tile(lambda mlp, x: mlp(x), axis=1, size=2048)(mlp, x)

    All variables of all modules among the arguments are parameters. The function must compute each
    position of the axis from this position alone, and must not write into the modules anything that
    depends on the activations.

    Args:
      function: a function of modules and arrays, or a bound method of a module. Without it, `tile`
        is a decorator with arguments.
      axis: see `lm.tiled`.
      size: see `lm.tiled`.
      static_argnums: positions of arguments that are not arrays.

    Raises:
      ValueError, TypeError: see `lm.tiled`.
    """
    if function is None:
        return functools.partial(tile, axis=axis, size=size, static_argnums=static_argnums)
    check_slices("nnx.tile", axis, size)

    def cut(pure):
        return tiled_call(pure, axis, size, "nnx.tile", _holds_module)

    return _on_modules("nnx.tile", function, static_argnums, cut)


def _on_modules(
    owner: str, function: Any, static_argnums: Any, make: Callable[[Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """Applies a transformation to a function of modules, or to a bound method of a module.

    Args:
      make: takes a function of pytrees, and returns a function of its arguments, its keyword
        arguments, and the positions of parameters and of static arguments.
    """
    if not callable(function) or isinstance(function, type | nnx.Module):
        raise TypeError(
            f"{owner}: function: expected a function of a module and its arguments, got "
            f"{function!r}; write lm.{owner}(lambda module, x: module(x), ...)(module, x)"
        )
    static = compression.positions(owner, "static_argnums", static_argnums)
    if isinstance(getattr(function, "__self__", None), nnx.Module):
        module, method = function.__self__, function.__func__
        moved = [i + 1 if i >= 0 else i for i in static]
        return functools.partial(_on_modules(owner, method, moved, make), module)

    def transformed(pure):
        call = make(pure)

        def run(args, kwargs):
            numbers = compression.in_range(owner, "static_argnums", static, args)
            return call(args, kwargs, set(), numbers)

        return run

    return on_trees(function, transformed)


def on_trees(
    function: Callable[..., Any], transform: Callable[..., Callable[[tuple, dict], Any]]
) -> Callable[..., Any]:
    """Applies a transformation of functions of pytrees to a function of modules, and of others.

    Args:
      function: it may write into the modules.
      transform: takes a function of pytrees, and returns a function of its arguments and keyword
        arguments.
    """

    def pure(*args, **kwargs):
        args, kwargs = nnx.from_tree((args, kwargs), ctxtag=_TAG, is_inner=True)
        out = function(*args, **kwargs)
        return nnx.to_tree((extract.clear_non_graph_nodes((args, kwargs)), out), ctxtag=_TAG)

    # Errors name what the user wrote.
    pure.__name__ = getattr(function, "__name__", type(function).__name__)
    vars(pure)["__wrapped__"] = function
    run = transform(pure)

    @functools.wraps(function)
    def transformed(*args, **kwargs):
        results = run(*nnx.to_tree((args, kwargs), ctxtag=_TAG))
        return nnx.from_tree(results, ctxtag=_TAG, is_inner=False)[1]

    return nnx.update_context(_TAG)(transformed)


#: The tag by which `nnx.to_tree` identifies modules outside `compress` with their copies inside.
_TAG = "lowmembp_compress"


def _holds_module(node: Any) -> bool:
    return isinstance(node, nnx.NodeStates)


def is_module(node: Any) -> bool:
    """Whether a node is a module, an `nnx.Optimizer` or another object that holds variables."""
    return isinstance(node, nnx.Pytree)
