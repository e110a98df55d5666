"""The functions of `pallas_kernels` as Triton kernels, called through jax-triton.

This file imports nothing of Triton. `flat` and `rows` need the package `triton`. They also need
`jax-triton` to run on a GPU, or PyTorch to run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import importlib
import os


def unavailable_reason() -> str | None:
    """Returns why the kernels cannot run in this environment, or None if they can.

    It imports the packages that it looks for. It does not look for a GPU: without a GPU, jax-triton
    0.3 raises an error when it lowers a kernel.
    """
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    for module, package in (
        ("triton", "triton"),
        ("torch", "torch") if interpret else ("jax_triton", "jax-triton"),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"the Triton kernels need the package {package} (pip install {package}): {error}"
    return None
