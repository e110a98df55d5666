"""How a Triton kernel is launched: on a GPU through jax-triton, on the CPU in the interpreter."""

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

#: Multiply-adds, which are what keeps the kernels at the speed of memory; off by default from
#: Triton 3.10 on.
BACKEND_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """A kernel with all that is static of one launch.

    Every size is a compile-time constant, as it is in the XLA program around: Triton then knows
    what divides what, and no integer needs a type. A kernel's parameters are its inputs, its
    outputs, its constants, in this order, which all versions of jax-triton take.
    """

    kernel: Any
    grid: tuple[int, ...]
    num_warps: int
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    name: str = ""


#: For an output that a launch leaves unwritten; an absent input is another input, unread.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.uint16)


def call(launch: Launch, *inputs: Array) -> list[Array]:
    """The outputs of a launch.

    Raises:
      RuntimeError: Triton or jax-triton cannot be used here, and why.
    """
    if reason := unavailable_reason():
        raise RuntimeError(reason)
    import triton

    if triton.knobs.runtime.interpret:
        from pallas_kernels.triton.interpreter import interpret

        run = functools.partial(interpret, launch)
        return list(jax.pure_callback(run, launch.outputs, *inputs, vmap_method="sequential"))
    import jax_triton

    # jax-triton 0.4 has other names than 0.3, and warns about an old one.
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        options = {"out_type": launch.outputs, "backend_options": dict(BACKEND_OPTIONS)}
    else:
        options = {"out_shape": launch.outputs, **BACKEND_OPTIONS}
    with jax.named_scope(launch.name):  # jax-triton's own name is not in the HLO
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
    """`run(*arrays)`, of a kernel, under `jax.vmap`.

    Args:
      run: a function of arrays or None, positional.
      fold: `fold(size, batched, *arrays)`, the outputs for arrays with a leading axis of `size`
        where `batched` (a list of bool) says so; or None, and `run` is then looped over.

    It is also what makes jax-triton 0.4.1 work under jit with JAX 0.12: its rule for the removal
    of dead code has an old signature, and is not asked about an equation inside `custom_vmap`.
    """
    function = custom_vmap(run)

    @function.def_vmap
    def rule(size, batched, *arrays):
        batched = [bool(jax.tree.leaves(each)) and jax.tree.leaves(each)[0] for each in batched]
        out = fold(size, batched, *arrays)
        if out is None:
            looped = [a for a, each in zip(arrays, batched, strict=True) if each]

            def one(elements):
                rest = iter(elements)
                return function(
                    *(next(rest) if each else a for a, each in zip(arrays, batched, strict=True))
                )

            out = lax.map(one, looped)
        return out, jax.tree.map(lambda _: True, out)

    return function
