"""What the Pallas and the Triton kernels have in common: arguments, their checks, results."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

#: Multiprocessors assumed where the caller does not say: H100, H200.
DEFAULT_CORES = 132

#: Activations that have a kernel, and elements of which one mark says where the NaNs are.
FUNCTIONS = ("gelu_tanh", "gelu_erf", "silu")
GROUPS = (32, 64, 128)


class NormForward(NamedTuple):
    """Results of `norm_forward`; `normalized` is None where not asked for."""

    out: Array  # [rows, width], dtype
    rstd: Array  # [rows], float32
    normalized: Array | None  # [rows, width], dtype


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def check_float(name: str, dtype) -> jnp.dtype:
    """The dtype; raises TypeError unless the kernels compute with it."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
    return dtype


def check_group(group: int | None, size: int) -> None:
    """Raises ValueError unless `group` is None or divides an array of `size` elements."""
    if group is not None and (group not in GROUPS or size % group):
        raise ValueError(f"group={group} must be one of {GROUPS} and divide the size, {size}")


def check_activation(function: str, thresholds: Sequence[float]) -> None:
    """Raises ValueError for a function without a kernel or more thresholds than 2 bits count."""
    if function not in FUNCTIONS:
        raise ValueError(f"function={function!r} is not one of {FUNCTIONS}")
    if not 1 <= len(thresholds) <= 3:
        raise ValueError(f"thresholds must be 1 to 3 numbers, got {thresholds}")


def check_rows(rows_width: tuple[int, ...], **arrays: Array | None) -> None:
    """Raises unless arrays are floating, `[rows]` for rstd, `[width]` for scale and bias."""
    if len(rows_width) != 2:
        raise ValueError(f"the first argument must be [rows, width], got {rows_width}")
    expected = {"scale": rows_width[1:], "bias": rows_width[1:], "rstd": rows_width[:1]}
    for name, array in arrays.items():
        if array is not None:
            check_float(name, array.dtype)
            if array.shape != (shape := expected.get(name, rows_width)):
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
