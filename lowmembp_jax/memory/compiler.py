"""XLA's GPU compiler where there is no GPU: what it refuses, and what helps."""

import os
import re
from typing import Any

import jax

from lowmembp_jax.memory.constants import StepError

_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"


def check_platform() -> None:
    """What a step computes while it is traced needs a device of this machine."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        raise StepError(
            f"JAX_PLATFORMS={platforms!r}: this machine has no such device. Tracing a step needs "
            f"one, compiling it does not: accepted are 'cpu' and what JAX finds here"
        ) from error


def compile_lowered(
    lowered: jax.stages.Lowered,
    device: str | os.PathLike[str],
    compiler_options: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """Compiles, with cuBLAS where XLA's Triton finds no tiles; and notes, see `Plan`.

    Raises:
      StepError: XLA has no such matrix product for this GPU, or no such option.
    """
    options = compiler_options or {}
    try:
        return lowered.compile(options), ()
    except jax.errors.JaxRuntimeError as error:
        if "compile option" in str(error) or "While setting option" in str(error):
            reason = str(error).removeprefix("INVALID_ARGUMENT: ")
            raise StepError(f"compiler_options: XLA refuses one: {reason}") from error
        if "Unsupported algorithm" in str(error):
            what = re.search(r"ALG_DOT_\w+", str(error))
            raise StepError(
                f"device={str(device)!r} has no matrix product in {what[0] if what else 'this'} "
                f"precision: compute in another dtype, such as float16 in place of bfloat16"
            ) from error
        # On a GPU XLA tries many tilings; without one it takes the first, which may not be.
        if "Couldn't find output tile sizes" not in str(error) or _TRITON_PRODUCTS in options:
            raise
    compiled = lowered.compile({**options, _TRITON_PRODUCTS: False})
    return compiled, (f"compiled with {_TRITON_PRODUCTS}=False: XLA found no tiles for a product",)
