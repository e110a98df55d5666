"""The operators for Flax NNX: `lm.nnx`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from lowmembp_jax import compression
from lowmembp_jax.activations import regelu2, resilu2
from lowmembp_jax.arrays import real_array
from lowmembp_jax.compression import StorageDtype, products_saveable
from lowmembp_jax.flax_norms import check_norm, normalize_as
from lowmembp_jax.implementations import check_implementation

Function = TypeVar("Function", bound=Callable[..., Any])


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
    """`lm.resilu2` as a module; `implementation` as of `ReGELU2`."""

    def __init__(self, *, implementation: str | None = None):
        check_implementation(implementation)
        self.implementation = implementation

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return resilu2(x, implementation=self.implementation)


class _KeepsOutput:
    """The arguments that a norm of NNX gets besides its own."""

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

    Arguments, parameters and state are those of `nnx.LayerNorm`. Besides:

    Args:
      residual: "auto", "normalized" or "output": what is kept where there is an affine.
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
    """`nnx.RMSNorm`, differentiated from its output; arguments and errors as of `MSLayerNorm`."""

    def __call__(
        self, x: Float[Array, "*shape"], mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "*shape"]:
        return apply_norm(self, self, x, mask, center=False)


def apply_norm(fields: Any, holder: Any, x: Array, mask: Array | None, center: bool) -> Array:
    """`normalize` by the fields of a norm, with the scale and the bias that `holder` has."""
    params = (getattr(holder, name, None) for name in ("scale", "bias"))
    scale, bias = (None if param is None else param[...] for param in params)
    # NNX rounds x and the parameters to the dtype first; linen only its result.
    x, *given = fields.promote_dtype(
        (real_array(x), *(p for p in (scale, bias) if p is not None)), dtype=fields.dtype
    )
    rest = iter(given)
    scale, bias = (None if p is None else next(rest) for p in (scale, bias))
    return normalize_as(fields, x, scale, bias, mask, center)


def compress(
    function: Function,
    *,
    dtype: StorageDtype = jnp.float8_e4m3fn,
    policy: Callable[..., Any] | None = products_saveable,
    static_argnums: int | Sequence[int] = (),
) -> Function:
    """`lm.compress` for a function of an NNX module and other arguments; used like `nnx.remat`.

        y = lm.nnx.compress(lambda block, x: block(x))(block, x)

        class Block(nnx.Module):
            @lm.nnx.compress
            def __call__(self, x): ...

    The variables of the module are parameters, kept as they are; the other arguments are
    activations. What the function writes into variables, such as statistics and counts of random
    numbers, is written.

    Args:
      function: its first argument is a module, or any tree of modules and variables.
      dtype: see `lm.compress`.
      policy: see `lm.compress`.
      static_argnums: positions of arguments that are not traced; 0 is the module. Arguments that
        are no arrays are never traced.

    Raises:
      ValueError, TypeError: see `lm.compress`.
    """
    compression.compress(function, dtype=dtype, policy=policy)  # raises for what is not accepted
    numbers = compression.positions("nnx.compress: static_argnums", static_argnums, least=1)

    @functools.wraps(function)
    def compressed(module, *args, **kwargs):
        graph, state = nnx.split(module)

        def run(leaves, *args, **kwargs):
            inner = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
            out = function(inner, *args, **kwargs)
            after = nnx.split(inner)
            if after[0] != graph:
                raise ValueError(
                    f"compress: {run.__name__} changes the structure of its module, which it must "
                    "not: create variables in __init__"
                )
            written = enumerate(zip(leaves, jax.tree.leaves(after[1]), strict=True))
            return out, {i: new for i, (old, new) in written if new is not old}

        run.__name__ = getattr(function, "__name__", type(function).__name__)
        leaves = jax.tree.leaves(state)
        out, written = compression.compress(
            run, dtype=dtype, policy=policy, static_argnums=tuple(numbers)
        )(leaves, *args, **kwargs)
        if written:
            leaves = [written.get(i, leaf) for i, leaf in enumerate(leaves)]
            nnx.update(module, jax.tree.unflatten(jax.tree.structure(state), leaves))
        return out

    return compressed  # pyright: ignore[reportReturnType]
