"""Runs a launch on the CPU for tests, in Triton's interpreter, which works on PyTorch tensors.

Set TRITON_INTERPRET=1 before the first import of `triton`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def interpret(
    run: Callable[..., None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    *inputs: jax.Array,
) -> tuple[np.ndarray, ...]:
    """Returns the outputs of `run`, a kernel with its grid, for inputs on the host."""
    made = [torch.empty(out.shape, dtype=getattr(torch, out.dtype.name)) for out in outputs]
    with np.errstate(all="ignore"):  # kernels compute with infinities and NaNs, too
        run(*(_tensor(np.asarray(array)) for array in inputs), *made, **constants)
    return tuple(_array(output) for output in made)
