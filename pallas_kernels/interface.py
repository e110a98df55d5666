"""The interface of the Pallas and the Triton kernels: arguments, their checks, and results."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.step_table import code_bits

#: The default number of multiprocessors, from H100 and H200.
DEFAULT_CORES = 132

#: Activations that have a kernel.
FUNCTIONS = ("gelu_tanh", "gelu_erf", "silu")


class NormForward(NamedTuple):
    """Results of `norm_forward`; `normalized` is None without `keep_normalized`."""

    out: Array  # [rows, width], dtype
    rstd: Array  # [rows], float32
    normalized: Array | None  # [rows, width], dtype


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size` and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def check_float(name: str, dtype) -> jnp.dtype:
    """Returns the dtype; raises TypeError if the kernels do not support it."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {dtype}")
    return dtype


def _check_function(function: str) -> None:
    if function not in FUNCTIONS:
        raise ValueError(f"function: expected one of {FUNCTIONS}, got {function!r}")


def check_gated(function: str, **arrays: Array) -> None:
    """Checks the function, and that the arrays are floating with one shape and dtype.

    Raises:
      TypeError: an array has another dtype.
      ValueError: the function has no kernel; shapes or dtypes differ.
    """
    _check_function(function)
    kinds = {name: (check_float(name, a.dtype), a.shape) for name, a in arrays.items()}
    if len(set(kinds.values())) > 1:
        given = ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in kinds.items())
        raise ValueError(f"{' and '.join(kinds)}: expected one shape and dtype, got {given}")


def check_activation(function: str, thresholds: Sequence[float]) -> None:
    """Raises ValueError for a function without a kernel, or for too many thresholds for 4 bits."""
    _check_function(function)
    if not 1 <= len(thresholds) <= 15:
        raise ValueError(f"thresholds: expected 1 to 15 numbers, got {thresholds}")


def check_codes(packed: Array, size: int, levels: Sequence[float]) -> None:
    """Raises ValueError if `packed` cannot hold `size` codes, or `levels` are not 2 to 16."""
    if not 2 <= len(levels) <= 16:
        raise ValueError(f"levels: expected 2 to 16 numbers, got {levels}")
    shape = (-(-size // (8 // code_bits(len(levels)))),)
    if packed.dtype != jnp.uint8 or packed.shape != shape:
        raise ValueError(
            f"packed: expected uint8 {shape} for {size} elements, got {packed.dtype} {packed.shape}"
        )


def check_rows(rows_width: tuple[int, ...], **arrays: Array | None) -> None:
    """Checks dtypes and shapes: `[rows]` for rstd, `[width]` for scale and bias.

    Raises:
      TypeError: an array has another dtype.
      ValueError: an array has another shape.
    """
    if len(rows_width) != 2:
        raise ValueError(f"first argument: expected [rows, width], got {rows_width}")
    expected = {"scale": rows_width[1:], "bias": rows_width[1:], "rstd": rows_width[:1]}
    for name, array in arrays.items():
        if array is not None:
            check_float(name, array.dtype)
            if array.shape != (shape := expected.get(name, rows_width)):
                raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
