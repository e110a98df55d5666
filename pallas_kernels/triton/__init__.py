"""The kernels of `pallas_kernels`, with the same functions, in Triton through jax-triton.

Nothing of Triton is imported here. `activation`, `gated` and `normalization` need the package
`triton`, and `jax-triton` to run on a GPU, or PyTorch to run in Triton's interpreter
(TRITON_INTERPRET=1).
"""

import importlib
import os


def unavailable_reason() -> str | None:
    """Why the kernels cannot run in this environment, None if they can.

    It imports what it looks for. That there is a GPU is not asked: it is known where the kernels
    are lowered, and jax-triton 0.3 raises there without one.
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
