"""The operators of this library inside a model that somebody else wrote.

Activations: see `patched_activations`. Norms: `nn.intercept_methods`, thread-local as all state
here, reaches the `__call__` of every linen module.

The settings are part of JAX's trace context (`jax.make_user_context`), and so of the key of
every cache of traces and programs: nothing traced inside serves outside, nor the other way round.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from lowmembp_jax.norms import RESIDUALS, Residual
from lowmembp_jax.patched_activations import swapped_activations
from lowmembp_jax.patched_norms import call_norm, norm_op, why_not_swapped


@dataclass
class PatchReport:
    """What one `with lm.patch() as report:` met, by operator and module path.

    Paths read "encoder/layer_0/mlp", and "" outside linen modules. Only what is traced is met:
    a call that `jax.jit` serves from its cache adds nothing.

    Attributes:
      swapped: "gelu", "silu", "layer_norm" or "rms_norm" -> the places, each once, in order.
      skipped: the same -> {place: why the original ran}.
    """

    swapped: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = ["swapped:" if self.swapped else "swapped: nothing"]
        for op, places in self.swapped.items():
            names = ", ".join(place or "(no module)" for place in places)
            lines.append(f"  {op} in {len(places)} places: {names}")
        lines += ["not swapped:"] if self.skipped else []
        for op, reasons in self.skipped.items():
            lines += [f"  {op} in {at or '(no module)'}: {why}" for at, why in reasons.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Settings:
    activations: bool
    norms: bool
    norm_dtype: jnp.dtype | None
    norm_residual: Residual


@dataclass
class _Entry:
    """One `with lm.patch()` that a thread is in."""

    settings: _Settings
    report: PatchReport
    place: str
    silu_traced: bool = False

    def seen(self, op: str, reason: str | None) -> None:
        self.silu_traced |= op == "silu"
        if reason is not None:
            self.report.skipped.setdefault(op, {})[self.place] = reason
        elif self.place not in self.report.swapped.setdefault(op, []):
            self.report.swapped[op].append(self.place)


class _Thread(threading.local):
    entry: _Entry | None = None


_thread = _Thread()
_trace_context = jax.make_user_context(None)


def _intercept(entry: _Entry, next_fun, args, kwargs, context):
    if _thread.entry is not entry:  # a patch further inside decides
        return next_fun(*args, **kwargs)
    module, settings, outer = context.module, entry.settings, entry.place
    entry.place = "" if module.scope is None else "/".join(module.path)
    try:
        op = norm_op(module) if settings.norms and context.method_name == "__call__" else None
        if op is None:
            return next_fun(*args, **kwargs)
        reason = why_not_swapped(module, *args, **kwargs)
        entry.seen(op, reason)
        if reason is not None:
            return next_fun(*args, **kwargs)
        return call_norm(
            module, *args, dtype=settings.norm_dtype, residual=settings.norm_residual, **kwargs
        )
    finally:
        entry.place = outer
        if entry.silu_traced:
            # jax.nn.silu is jitted: the next module would get it from its cache, unreported.
            jax.nn.silu.clear_cache()
            entry.silu_traced = False


@contextlib.contextmanager
def _patch(settings: _Settings) -> Iterator[PatchReport]:
    outer = _thread.entry
    entry = _Entry(settings, PatchReport(), outer.place if outer else "")
    with (
        _trace_context(settings),
        nn.intercept_methods(partial(_intercept, entry)),
        swapped_activations(entry.seen if settings.activations else None),
    ):
        _thread.entry = entry
        try:
            yield entry.report
        finally:
            _thread.entry = outer


def patch(
    *,
    activations: bool = True,
    norms: bool = True,
    norm_dtype: jax.typing.DTypeLike | None = None,
    norm_residual: Residual = "normalized",
) -> contextlib._GeneratorContextManager[PatchReport]:
    """Runs this library's operators in Flax code that is traced inside, without editing it.

        with lm.patch(norm_dtype=jnp.bfloat16) as report:
            grads = jax.jit(jax.grad(loss))(params, batch)
        print(report)

        @jax.jit
        @lm.patch()
        def train_step(state, batch): ...

    Swapped are, with their parameters as they are:

    - `jax.nn.gelu` for `lm.regelu2`, `jax.nn.silu` (`swish`) for `lm.resilu2`: the functions of
      `flax.linen` and `flax.nnx` too, and wherever a reference was captured, under another name,
      in a `partial`, a registry such as the `ACT2FN` of `transformers`, a field of a module.
      The forward is the original's, computed in float32 for 16-bit inputs; forward-mode
      differentiation raises JAX's error for `custom_vjp`.
    - `nn.LayerNorm` for `lm.MSLayerNorm`, `nn.RMSNorm` for `lm.MSRMSNorm`, subclasses that
      leave `__call__` alone, and the RMSNorms of the Llama, Mistral and Gemma of `transformers`.
      Not: `nnx.LayerNorm` and `nnx.RMSNorm`, norms with a mask or an `axis_name`. The report
      names the linen norms that were met and left.

    What counts is where a call is traced: in this thread, inside. A function that was jitted and
    traced outside is traced again when it is called inside, and the other way round, so decorate
    the train step or call it inside; a `jax.jit` inside whose result is called outside is plain.
    A nested `patch` replaces all settings of the outer one until it exits.

    Args:
      activations: swap gelu and silu.
      norms: swap LayerNorm and RMSNorm.
      norm_dtype: output dtype of the swapped norms, None for the model's own choice. Many
        models leave norms at a float32 output in front of bfloat16 Denses. These keep a bfloat16
        copy, and the norm shares it only with `norm_dtype=jnp.bfloat16`.
      norm_residual: "normalized" or "output", see `residual` of `lm.ms_layer_norm`.

    Returns:
      A context manager for one `with`, which gives a `PatchReport`; also a decorator.

    Raises:
      TypeError: `activations` or `norms` is not a bool; `norm_dtype` is not a floating dtype.
      ValueError: unknown `norm_residual`; nothing to swap.
    """
    for name, given in (("activations", activations), ("norms", norms)):
        if not isinstance(given, bool):
            raise TypeError(f"patch: {name}={given!r} is not accepted, only True and False")
    if not activations and not norms:
        raise ValueError("patch: activations=False and norms=False swap nothing: set one to True")
    if norm_residual not in RESIDUALS:
        raise ValueError(
            f"patch: norm_residual={norm_residual!r} is not known: "
            f"accepted are {', '.join(map(repr, RESIDUALS))}"
        )
    return _patch(_Settings(activations, norms, _floating(norm_dtype), norm_residual))


def _floating(norm_dtype) -> jnp.dtype | None:
    if norm_dtype is None:
        return None
    try:
        dtype = jnp.dtype(norm_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"patch: norm_dtype={norm_dtype!r} is not accepted, only None and floating dtypes "
            f"such as jnp.bfloat16"
        )
    return dtype
