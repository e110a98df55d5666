"""`lm.patch`: use this library's operators in a model that you cannot edit."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lowmembp_jax.operators.norms import Residual
from lowmembp_jax.patching._context import Patch
from lowmembp_jax.patching._report import PatchReport
from lowmembp_jax.patching._settings import check_settings


def patch(
    function: Callable | None = None,
    /,
    *,
    activations: bool | str | Sequence[str] | None = None,
    bits: int = 2,
    norms: bool | str | Sequence[str] | None = None,
    norm_dtype: jax.typing.DTypeLike | None = None,
    norm_residual: Residual = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    compress: str | Sequence[str] = (),
    checkpoint: bool = False,
    compress_dtype: jax.typing.DTypeLike = "float8",
) -> contextlib._GeneratorContextManager[PatchReport] | Any:
    """Uses this library's operators in Flax code that is traced inside, without editing it.

        with lm.patch(norm_dtype=jnp.bfloat16) as report:
            grads = jax.jit(jax.grad(loss))(params, batch)
        print(report)

        @jax.jit
        @lm.patch
        def train_step(state, batch): ...

    `lm.patch` swaps these operators, and leaves the model's parameters as they are:

    - `jax.nn.gelu` becomes `lm.gelu`, and `jax.nn.silu` (`swish`) becomes `lm.silu`. This covers
      the functions of `flax.linen` and `flax.nnx`, and every captured reference: another name, a
      `partial`, a registry such as the `ACT2FN` of `transformers`, a field of a module. The forward
      is the original one, computed in float32 for 16-bit inputs. Forward-mode differentiation
      raises JAX's error for `custom_vjp`.
    - `nn.LayerNorm` becomes `lm.MSLayerNorm`, `nn.RMSNorm` becomes `lm.MSRMSNorm`, and
      `nnx.LayerNorm` and `nnx.RMSNorm` become the norms of `lm.nnx`, even if a subclass calls them.
      The RMSNorms of Llama, Mistral, Gemma, T5 and LongT5 in `transformers` are swapped, too. Other
      classes and norms with an `axis_name` are not.

    Operators whose swap would not save memory are left alone. The report gives the reason. An
    activation whose output is multiplied by another Dense's, as in a SwiGLU, is recomputed exactly
    from its input. `lm.patch` recognizes it by the kernels of its module. The report also names
    custom norms and activations: classes with such a name, and functions that a linen module holds.

    With `compress="bert/encoder/layer/*"`, `lm.compress_module` wraps the linen modules at these
    paths instead. Their values do not change. Then gelu, silu and norms are swapped only if
    `activations` or `norms` asks for it. Name the blocks of the model, with one pattern for each
    kind. An NNX model needs no patch: `Block.__call__ = lm.nnx.compress(Block.__call__)`.

    With `checkpoint=True`, every `jax.checkpoint` of every function that is differentiated inside
    stores its residuals in 8 bits, with its own policy, as in `lm.compress_checkpoints`. It reaches
    code that you cannot edit: decorators that were applied at import, `nn.remat`, `nnx.remat`,
    Equinox. The differentiated arguments are the parameters; what the function closes over is data,
    and is not stored again. A gradient that is differentiated again stays exact, as do
    `jax.linearize` and forward mode. gelu, silu and norms are then swapped only if
    `activations` or `norms` asks for it. The report lists the checkpoints, with the bytes that each
    saves before and after, or why it was left alone.

    Only calls that are traced inside the context, in the same thread, are patched. JAX traces a
    jitted function again if it was traced outside and is called inside, or the reverse. So decorate
    the training step or call it inside: a `jax.jit` made inside and called outside is plain. A
    nested `patch` replaces all settings of the outer one until it exits.

    A generator that yields inside leaves its caller patched until it continues or is closed. A
    coroutine must not await inside, because JAX's contexts belong to a thread: if another coroutine
    is traced meanwhile, its operators raise a RuntimeError.

    Args:
      function: the function that `@lm.patch` decorates.
      activations: True swaps gelu and silu; the name "gelu" or "silu" swaps only that one. None
        means True unless `compress` or `checkpoint` is given.
      bits: bits that a swapped activation saves for each element, 2 or 4.
      norms: True swaps both norms; the name "layer_norm" or "rms_norm" swaps only that one. None
        means True unless `compress` or `checkpoint` is given.
      norm_dtype: output dtype of the swapped norms; None leaves the model's choice. Many models
        have norms with a float32 output in front of bfloat16 Denses. The Denses save a bfloat16
        copy, which the norm shares only with `norm_dtype=jnp.bfloat16`.
      norm_residual: "auto", "normalized" or "output", see `residual` of `lm.ms_layer_norm`.
      include: patterns of module paths such as "layers/*", where `*` stands for any part of one
        name. Only these modules and their submodules are swapped.
      exclude: patterns of modules to leave alone, with their submodules.
      compress: patterns of modules to compress. Each must match a module's whole path.
      checkpoint: whether to take over the checkpoints of differentiated functions.
      compress_dtype: the format in which the modules of `compress` and the checkpoints store
        residuals, see `dtype` of `lm.compress`.

    Returns:
      A context manager for one `with`, which gives a `PatchReport`. It is also a decorator.

    Raises:
      TypeError: `function` is not callable, or is a generator or a coroutine; `activations` or
        `norms` is neither a bool nor the name of an operator; `checkpoint` is not a bool;
        `norm_dtype` is not a floating dtype; patterns are not strings.
      ValueError: `bits`, `norm_residual` or `compress_dtype` is unknown; there is nothing to swap;
        at the exit, a pattern matches none of the modules that were called.
    """
    settings = check_settings(
        activations, bits, norms, norm_dtype, norm_residual, include, exclude, compress,
        checkpoint, compress_dtype,
    )  # fmt: skip
    context = Patch(settings)
    return context if function is None else context(function)
