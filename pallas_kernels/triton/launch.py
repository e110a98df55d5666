"""Launches Triton kernels: on a GPU through jax-triton, on the CPU in the interpreter."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from pallas_kernels.triton import unavailable_reason

#: Fused multiply-adds, without which the kernels would be slower than memory. They are off by
#: default from Triton 3.10 on.
BACKEND_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """A kernel with the static arguments of one launch.

    Every size is a compile-time constant, as in the XLA program around it. So Triton knows which
    sizes divide which, and no integer needs a type. A kernel's parameters are its inputs, outputs
    and constants, in this order, which all versions of jax-triton accept.
    """

    kernel: Any
    grid: tuple[int, ...]
    num_warps: int
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    name: str = ""


#: Stands for an output that a launch does not write. An absent input is any other input, unread.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.uint16)


def call(launch: Launch, *inputs: Array) -> list[Array]:
    """Runs a launch and returns its outputs.

    Raises:
      RuntimeError: Triton or jax-triton cannot be used here.
    """
    if reason := unavailable_reason():
        raise RuntimeError(reason)
    import triton

    if triton.knobs.runtime.interpret:
        from pallas_kernels.triton.interpreter import interpret

        kernel = launch.kernel[launch.grid]
        run = functools.partial(interpret, kernel, launch.outputs, launch.constants)
        return list(jax.pure_callback(run, launch.outputs, *inputs, vmap_method="sequential"))
    import jax_triton

    # jax-triton 0.4 has other names than 0.3, and warns about old names.
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        options = {"out_type": launch.outputs, "backend_options": dict(BACKEND_OPTIONS)}
    else:
        options = {"out_shape": launch.outputs, **BACKEND_OPTIONS}
    with jax.named_scope(launch.name):  # the HLO lacks the name that jax-triton gets
        results = jax_triton.triton_call(
            *inputs,
            kernel=launch.kernel,
            grid=launch.grid,
            num_warps=launch.num_warps,
            name=launch.name,
            **options,
            **launch.constants,
        )
    return list(results)


def batchable(run: Callable[..., Any], fold: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel's `run(*arrays)` work under `jax.vmap`.

    `custom_vmap` also makes jax-triton 0.4.1 work under jit with JAX 0.12. Its rule for dead code
    has an old signature, and JAX does not call it for an equation inside `custom_vmap`.

    Args:
      run: a function of positional arguments, arrays or None.
      fold: `fold(size, batched, *arrays)` returns the outputs for a batch, or None to loop over
        `run`. Arrays have a leading axis of `size` where the list `batched` is True.
    """
    function = custom_vmap(run)

    @function.def_vmap
    def rule(size, batched, *arrays):
        batched = [bool(jax.tree.leaves(each)) and jax.tree.leaves(each)[0] for each in batched]
        out = fold(size, batched, *arrays)
        if out is None:
            whole = [
                jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), array)
                if not is_batched
                else array
                for array, is_batched in zip(arrays, batched, strict=True)
            ]
            out = lax.map(lambda each: function(*each), whole)
        return out, jax.tree.map(lambda _: True, out)

    return function
