"""The operators of this library inside a model that somebody else wrote."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lowmembp_jax.operators.norms import Residual
from lowmembp_jax.patching._context import patched
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
    compress_dtype: jax.typing.DTypeLike = "float8",
) -> contextlib._GeneratorContextManager[PatchReport] | Any:
    """Runs this library's operators in Flax code that is traced inside, without editing it.

        with lm.patch(norm_dtype=jnp.bfloat16) as report:
            grads = jax.jit(jax.grad(loss))(params, batch)
        print(report)

        @jax.jit
        @lm.patch
        def train_step(state, batch): ...

    Swapped are, with their parameters as they are:

    - `jax.nn.gelu` for `lm.gelu`, `jax.nn.silu` (`swish`) for `lm.silu`: the functions of
      `flax.linen` and `flax.nnx` too, and wherever a reference was captured, under another name,
      in a `partial`, a registry such as the `ACT2FN` of `transformers`, a field of a module.
      The forward is the original's, computed in float32 for 16-bit inputs; forward-mode
      differentiation raises JAX's error for `custom_vjp`.
    - `nn.LayerNorm` for `lm.MSLayerNorm`, `nn.RMSNorm` for `lm.MSRMSNorm`, `nnx.LayerNorm` and
      `nnx.RMSNorm` for those of `lm.nnx`, also where a subclass calls them. Linen modules under
      other names that compute one of the two, tried on random numbers while they are traced:
      those of Llama, Gemma and T5 in `transformers`. Not: norms with an `axis_name`.

    Left, with the reason in the report, is what would not keep less: an activation whose output is
    multiplied by another Dense's, as in a SwiGLU, which is told from the kernels of its module and
    is then computed again from its input, exactly. The report names norms and activations that are
    of a kind unknown to it: classes that are named so, functions that a linen module holds.

    With `compress="encoder/layer/*"`, the calls of the linen modules at these paths are those of
    `lm.compress_module` instead: their values do not change, nor do gelu, silu and norms. Take the
    blocks of the model, one pattern for a kind. Of an NNX model, in one line and without patch:
    `Block.__call__ = lm.nnx.compress(Block.__call__)`.

    What counts is where a call is traced: in this thread, inside. A function that was jitted and
    traced outside is traced again when it is called inside, and the other way round, so decorate
    the train step or call it inside; a `jax.jit` inside whose result is called outside is plain.
    A nested `patch` replaces all settings of the outer one until it exits.

    A generator that yields inside leaves its caller patched until it goes on or is closed. A
    coroutine must not await inside: JAX's contexts are a thread's, and the operators of another
    coroutine that is traced meanwhile raise a RuntimeError.

    Args:
      function: what `@lm.patch` decorates: no generator and no coroutine, which run later.
      activations: swap gelu and silu, or the one that is named; None: unless `compress` is given.
      bits: that they keep an element, 2 or 4.
      norms: swap "layer_norm" and "rms_norm", or the one that is named; None: unless `compress` is
        given.
      norm_dtype: output dtype of the swapped norms, None for the model's own choice. Many
        models leave norms at a float32 output in front of bfloat16 Denses. These keep a bfloat16
        copy, and the norm shares it only with `norm_dtype=jnp.bfloat16`.
      norm_residual: "auto", "normalized" or "output", see `residual` of `lm.ms_layer_norm`.
      include: patterns of module paths, `*` for any part of one name, such as "layers/*": swap
        in these modules, and in what they hold, and nowhere else.
      exclude: patterns of modules to leave as they are, with what they hold.
      compress: patterns of modules to compress, each its whole path.
      compress_dtype: of what these modules keep, see `dtype` of `lm.compress`.

    Returns:
      A context manager for one `with`, which gives a `PatchReport`; also a decorator.

    Warns:
      UserWarning: linen modules were called, and `compress` matches none of them.

    Raises:
      TypeError: `function` is no function; `activations` or `norms` is no bool and names no
        operator; `norm_dtype` is not a floating dtype; patterns are not strings.
      ValueError: unknown `bits`, `norm_residual` or `compress_dtype`; nothing to swap.
    """
    if function is not None and not callable(function):
        raise TypeError(f"patch: {function!r} is not accepted, only settings by name")
    settings = check_settings(
        activations, bits, norms, norm_dtype, norm_residual, include, exclude, compress,
        compress_dtype,
    )  # fmt: skip
    context = patched(settings)
    return context if function is None else context(function)
