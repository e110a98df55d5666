"""The fields that the norms of linen and NNX share, and their meaning."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax.linen import dtypes
from jaxtyping import Array, Bool, Float

from lowmembp_jax.kernels.implementations import check_implementation, choose_implementation
from lowmembp_jax.operators.norms import NormSpec, check_residual, normalize

#: The fields of a norm that `check_norm` and `normalize_as` read, without residual and
#: implementation.
FIELDS = (
    "axis_name", "axis_index_groups", "reduction_axes", "feature_axes", "epsilon",
    "use_fast_variance", "dtype",
)  # fmt: skip


def all_axes(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Returns non-negative axes in ascending order."""
    axes = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({axis + rank if axis < 0 else axis for axis in axes}))


def check_norm(norm: Any) -> None:
    """Raises ValueError for fields of a norm that are not supported."""
    check_implementation(norm.implementation)
    check_residual(norm.residual)
    unsupported = {
        "axis_name": (norm.axis_name, None),
        "axis_index_groups": (norm.axis_index_groups, None),
        "force_float32_reductions": (getattr(norm, "force_float32_reductions", True), True),
    }
    for field, (given, accepted) in unsupported.items():
        if given != accepted:
            raise ValueError(
                f"{field}={given!r} is not supported: expected {accepted!r}; statistics are always "
                f"float32, and jit combines the statistics of all devices"
            )


def normalize_as(
    norm: Any,
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None,
    bias: Float[Array, "*features"] | None,
    mask: Bool[Array, "..."] | None,
    center: bool,
) -> Float[Array, "*shape"]:
    """Calls `normalize` with the fields of a linen or NNX norm."""
    features = all_axes(x.ndim, norm.feature_axes)
    shape = tuple(size if axis in features else 1 for axis, size in enumerate(x.shape))
    scale, bias = (None if p is None else p.reshape(shape) for p in (scale, bias))
    dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=norm.dtype)
    spec = NormSpec(
        axes=all_axes(x.ndim, norm.reduction_axes),
        center=center,
        epsilon=norm.epsilon,
        x_dtype=x.dtype,
        dtype=jnp.dtype(dtype),
        fast_variance=norm.use_fast_variance,
        residual=norm.residual,
        implementation=choose_implementation(norm.implementation),
    )
    return normalize(spec, x, scale, bias, mask)
