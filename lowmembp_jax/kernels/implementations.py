"""Chooses the implementation of an operator: jnp operations that XLA compiles, or a GPU kernel."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import pallas_kernels.triton

#: "xla": jnp operations, on every platform. "pallas" and "triton": one kernel for the forward and
#: one for the backward, on CUDA GPUs. "pallas_interpret": the Pallas kernels in JAX's interpreter,
#: on every platform, slow, for tests.
IMPLEMENTATIONS: tuple[str, ...] = ("xla", "pallas", "triton", "pallas_interpret")

#: The environment variable that names the implementation if no code does.
VARIABLE = "LOWMEMBP_IMPLEMENTATION"

_context = jax.make_user_context(default_value=None)


def check_implementation(implementation: str | None, name: str = "implementation") -> None:
    """Checks that `implementation` is None or can run here; never replaces it silently.

    Raises:
      ValueError: the implementation is unknown.
      RuntimeError: the implementation cannot run in this environment.
    """
    if implementation is None:
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{name}: expected None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, got "
            f"{implementation!r}"
        )
    if implementation == "triton" and (reason := pallas_kernels.triton.unavailable_reason()):
        raise RuntimeError(f"{name}: 'triton' cannot run here: {reason}")


@contextmanager
def set_implementation(implementation: str | None) -> Iterator[None]:
    """Makes operators use `implementation` inside the context if their argument is None.

    The context acts when a function is traced. `jax.jit` traces again in another context.

    Args:
      implementation: one of `lm.IMPLEMENTATIONS`, or None for the default.

    Raises:
      ValueError, RuntimeError: see `check_implementation`.
    """
    check_implementation(implementation)
    with _context(implementation):
        yield


def choose_implementation(implementation: str | None) -> str:
    """Chooses the implementation: the argument, or the context's, the environment's, the default.

    The environment is read when a function is traced. The default is "xla" on every platform,
    because no kernel has been measured inside a training step yet.

    Raises:
      ValueError, RuntimeError: see `check_implementation`.
    """
    from_environment = os.environ.get(VARIABLE) or None
    for name, choice in (
        ("implementation", implementation),
        ("lm.set_implementation", _context.value),
        (VARIABLE, from_environment),
    ):
        if choice is not None:
            check_implementation(choice, name)
            return choice
    return "xla"


def only_on_gpu(kernel: Callable, name: str) -> Callable:
    """Makes lowering of `kernel` for a platform other than CUDA an error that names it."""

    def run(*args):
        refuse = partial(_refuse, name=name, shapes=jax.eval_shape(kernel, *args))
        return lax.platform_dependent(*args, cuda=kernel, default=refuse)

    return run


def _refuse(*args, name, shapes):
    leaves, treedef = jax.tree.flatten(shapes)
    out = _refuse_p.bind(
        *jax.tree.leaves(args), name=name, avals=tuple((s.shape, s.dtype) for s in leaves)
    )
    return jax.tree.unflatten(treedef, out)


def _refuse_lowering(ctx, *_, name, avals):
    platforms = ctx.platforms or ctx.module_context.platforms
    raise ValueError(
        f"implementation: {name!r} runs only on CUDA GPUs, but JAX compiles for "
        f"{', '.join(platforms)}; choose 'xla', or 'pallas_interpret' to test"
    )


_refuse_p = Primitive("lowmembp_kernel_needs_a_gpu")
_refuse_p.multiple_results = True
_refuse_p.def_abstract_eval(
    lambda *_, name, avals: [ShapedArray(shape, dtype) for shape, dtype in avals]
)
mlir.register_lowering(_refuse_p, _refuse_lowering)


def _refuse_batched(args, axes, *, name, avals):
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    out = _refuse_p.bind(
        *jax.tree.leaves(args), name=name, avals=tuple(((size, *s), d) for s, d in avals)
    )
    return out, [0] * len(out)


batching.primitive_batchers[_refuse_p] = _refuse_batched
