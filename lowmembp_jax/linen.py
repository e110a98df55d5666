"""Flax linen modules with the fields and parameters of the modules that they replace."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms
from jaxtyping import Array, Float

from lowmembp_jax._arguments import as_items, real_array
from lowmembp_jax._flax_norms import all_axes, check_norm, normalize_as
from lowmembp_jax.compression import StorageFormat, check_options, in_range, positions, stored
from lowmembp_jax.kernels.implementations import check_implementation
from lowmembp_jax.operators.activations import regelu2, resilu2
from lowmembp_jax.policies import products_saveable
from lowmembp_jax.tiles import check_slices, tiled_call


class ReGELU2(nn.Module):
    """`lm.regelu2` as a module: GELU that saves 2 bits an element for the backward pass.

    Attributes:
      approximate: the tanh form (True) or the erf form.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    approximate: bool = True
    implementation: str | None = None

    def __post_init__(self):
        check_implementation(self.implementation)
        super().__post_init__()

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return regelu2(x, self.approximate, implementation=self.implementation)


class ReSiLU2(nn.Module):
    """`lm.resilu2` as a module: SiLU that saves 2 bits an element for the backward pass.

    Attributes:
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.
    """

    implementation: str | None = None

    def __post_init__(self):
        check_implementation(self.implementation)
        super().__post_init__()

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return resilu2(x, implementation=self.implementation)


def _apply_norm(norm: nn.Module, x: Array, mask, center: bool, use_bias: bool) -> Array:
    """Creates the parameters as Flax's own norms do and applies `normalize`."""
    x = real_array(x)
    shape = tuple(x.shape[axis] for axis in all_axes(x.ndim, norm.feature_axes))
    scale = bias = None
    if norm.use_scale:
        scale = norm.param("scale", norm.scale_init, shape, norm.param_dtype)
    if use_bias:
        bias = norm.param("bias", norm.bias_init, shape, norm.param_dtype)
    return normalize_as(norm, x, scale, bias, mask, center)


class _KeepsOutput(nn.Module):
    """Adds the attributes `residual` and `implementation` to a norm of linen."""

    residual: str = "auto"
    implementation: str | None = None

    def __post_init__(self):
        check_norm(self)
        super().__post_init__()


class MSLayerNorm(_KeepsOutput, nn.LayerNorm):
    """`nn.LayerNorm`, differentiated from its output: see `lm.ms_layer_norm`.

    It has the fields, parameters, initial values and automatic names (`LayerNorm_0`) of
    `nn.LayerNorm`, so a checkpoint loads unchanged. Set `dtype` to the dtype of the next Dense.
    Otherwise the two share no residual.

    Attributes:
      residual: "auto", "normalized" or "output": which array to save if there is a scale or bias.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Raises:
      ValueError: at construction for `axis_name`, `axis_index_groups` and
        `force_float32_reductions=False`; at the call for a `mask` that does not broadcast to x.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, mask=None) -> Float[Array, "*shape"]:
        return _apply_norm(self, x, mask, center=True, use_bias=self.use_bias)


class MSRMSNorm(_KeepsOutput, nn.RMSNorm):
    """`nn.RMSNorm`, differentiated from its output: see `lm.ms_rms_norm`.

    It has the fields, parameters, initial values and automatic names of `nn.RMSNorm`. The added
    attributes and the errors are the same as for `MSLayerNorm`.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, mask=None) -> Float[Array, "*shape"]:
        return _apply_norm(self, x, mask, center=False, use_bias=False)


# Flax names a module after its class. Named LayerNorm_0, an existing checkpoint loads.
MSLayerNorm.__name__ = "LayerNorm"
MSRMSNorm.__name__ = "RMSNorm"


def _lifted(
    function: Callable[..., Any], call: Callable[..., Any], static: Any, owner: str, wrapped: Any
):
    """Calls a `function(scope, *args)` of Flax's core through `call`.

    Args:
      call: takes a function, its arguments, its keyword arguments, the positions of static
        arguments, and whether it makes parameters. Arguments 0 and 1 are the variables and the
        random keys.
    """

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        def run(variables, rngs, *args, **kwargs):
            scope = scope_fn(variables, rngs)
            return function(scope, *args, **kwargs), repack_fn(scope)

        # Errors name what the user wrote.
        run.__name__ = getattr(wrapped, "__name__", owner)
        vars(run)["__wrapped__"] = wrapped.__call__ if isinstance(wrapped, type) else wrapped
        # Position 0 is the module.
        own = in_range(owner, "static_argnums", static, (None, *args))
        scopes = jax.tree.leaves(scope_fn(variables, rngs))
        makes_params = any(scope.is_mutable_collection("params") for scope in scopes)
        return call(run, (variables, rngs, *args), kwargs, {i + 1 for i in own}, makes_params)

    return lift.pack(inner, (True,), (True,), (True,), name=owner, enable_kwargs=True)


def _wrapped(owner: str, target: Any, call: Callable[..., Any], static_argnums: Any, methods: Any):
    """Wraps a class of modules, or a function of a module, by `_lifted`."""
    if not callable(target):
        raise TypeError(f"{owner}: target: expected a class of modules, got {target!r}")
    numbers = positions(owner, "static_argnums", static_argnums)
    if 0 in numbers:
        raise ValueError(
            f"{owner}: static_argnums: expected positions from 1 on (0 is the module), "
            f"got {static_argnums!r}"
        )
    methods = None if methods is None else _method_names(owner, target, methods)
    transformed: Any = transforms.lift_transform(
        _lifted, target, call=call, static=numbers, owner=owner, wrapped=target, methods=methods
    )
    if isinstance(target, type):
        # Flax names a module after its class, so an existing checkpoint loads.
        transformed.__name__ = target.__name__
    return transformed


def _method_names(owner: str, target: Any, methods: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(methods, str) else as_items(methods)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{owner}: methods: expected names of methods, such as ('__call__',), got {methods!r}"
        )
    for name in names if isinstance(target, type) else ():
        if not callable(getattr(target, name, None)):
            raise ValueError(
                f"{owner}: methods: expected methods of {target.__name__}, got {name!r}"
            )
    return names


def compress_module(
    target: Any = None,
    *,
    dtype: StorageFormat = "float8",
    policy: Callable[..., Any] | None = products_saveable,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: Any = True,
    offload: Literal["pinned_host"] | None = None,
    methods: Iterable[str] | None = None,
) -> Any:
    """Wraps a linen module class, as `nn.remat` does, so that `lm.compress` compresses its call.

        x = lm.compress_module(Block)(features)(x)

    Parameters, module names, random numbers and collections stay the same, so checkpoints load
    unchanged. All variables are parameters: they are never rounded. The arguments of the call are
    activations.

    Args:
      target: a subclass of `nn.Module`, or a function of a module and other arguments. Without it,
        `compress_module` is a decorator with arguments.
      dtype: see `lm.compress`.
      policy: see `lm.compress`.
      static_argnums: positions of arguments that are not traced; 0 is `self`, as in `nn.remat`.
        Arguments that are neither arrays nor floats are never traced.
      prevent_cse: see `lm.compress`.
      offload: see `lm.compress`.
      methods: names of the methods to compress, `__call__` by default; ignored for a function.

    Returns:
      A subclass of `target`, or a function of the same arguments.

    Raises:
      ValueError, TypeError: see `lm.compress`.
    """
    if target is None:
        return lambda target: compress_module(
            target, dtype=dtype, policy=policy, static_argnums=static_argnums,
            prevent_cse=prevent_cse, offload=offload, methods=methods,
        )  # fmt: skip
    options = check_options("compress_module", dtype, policy, prevent_cse, offload)
    name = f"lm.compress_module({getattr(target, '__name__', type(target).__name__)})"

    def call(run, args, kwargs, static, _):
        return stored(run, options, name)(args, kwargs, {0, 1}, static)

    return _wrapped("compress_module", target, call, static_argnums, methods)


def tile_module(
    target: Any = None,
    *,
    axis: int,
    size: int,
    static_argnums: int | Sequence[int] = (),
    methods: Iterable[str] | None = None,
) -> Any:
    """Wraps a linen module class so that `lm.tiled` calls it on slices of its activations.

        x = lm.tile_module(Mlp, axis=1, size=2048)(features)(x)

    The module must compute each position of the axis from this position alone, see `lm.tiled`.
    Parameters, module names and collections stay the same, so checkpoints load unchanged. Each
    slice draws random numbers of its own.

    Args:
      target: a subclass of `nn.Module`, or a function of a module and other arguments. Without it,
        `tile_module` is a decorator with arguments.
      axis: see `lm.tiled`.
      size: see `lm.tiled`.
      static_argnums: positions of arguments that are not arrays; 0 is `self`.
      methods: names of the methods, `__call__` by default; ignored for a function.

    Returns:
      A subclass of `target`, or a function of the same arguments.

    Raises:
      ValueError, TypeError: see `lm.tiled`. A module that changes its variables, such as BatchNorm
        in training, gives results without the axis.
    """
    if target is None:
        return functools.partial(
            tile_module, axis=axis, size=size, static_argnums=static_argnums, methods=methods
        )
    check_slices("tile_module", axis, size)

    def call(run, args, kwargs, static, makes_params):
        if makes_params:
            return run(*args, **kwargs)
        cut = tiled_call(run, axis, size, "tile_module")
        return cut(args, kwargs, {0, 1}, static)

    return _wrapped("tile_module", target, call, static_argnums, methods)
