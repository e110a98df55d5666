"""Runs a launch on the CPU for tests, in Triton's interpreter, which works on PyTorch tensors.

Set TRITON_INTERPRET=1 before the first import of `triton`.
"""

import jax
import ml_dtypes
import numpy as np
import torch

from pallas_kernels.triton.launch import Launch


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def interpret(launch: Launch, *inputs: jax.Array) -> tuple[np.ndarray, ...]:
    """Returns the outputs of `launch` for inputs in host memory."""
    outputs = [
        torch.empty(out.shape, dtype=getattr(torch, out.dtype.name)) for out in launch.outputs
    ]
    with np.errstate(all="ignore"):  # kernels compute with infinities and NaNs, too
        launch.kernel[launch.grid](
            *(_tensor(np.asarray(array)) for array in inputs), *outputs, **launch.constants
        )
    return tuple(_array(output) for output in outputs)
