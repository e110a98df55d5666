"""The operators of this library inside a model that somebody else wrote.

Activations: see `patched_activations`. Norms: `nn.intercept_methods`, thread-local as all state
here, reaches the `__call__` of every linen module.

The settings are part of JAX's trace context (`jax.make_user_context`), and so of the key of
every cache of traces and programs: nothing traced inside serves outside, nor the other way round.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lowmembp_jax.compressed_module import compress_module
from lowmembp_jax.norms import RESIDUALS, Residual
from lowmembp_jax.patched_activations import swapped_activations
from lowmembp_jax.patched_norms import norm_op, swap_norm
from lowmembp_jax.storage import check_storage


@dataclass
class PatchReport:
    """What one `with lm.patch() as report:` met, by operator and module path.

    Paths read "encoder/layer_0/mlp", and "" outside linen modules. Only what is traced is met:
    a call that `jax.jit` serves from its cache adds nothing.

    Attributes:
      swapped: "gelu", "silu", "layer_norm", "rms_norm" or "compress" -> the places, each once, in
        order.
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
    bits: int | None
    norms: bool
    norm_dtype: jnp.dtype | None
    norm_residual: Residual
    compress: tuple[str, ...] = ()
    compress_dtype: jnp.dtype | None = None

    def compresses(self, place: str) -> bool:
        names = place.split("/")
        return any(
            len(parts) == len(names) and all(map(fnmatchcase, names, parts))
            for parts in (pattern.split("/") for pattern in self.compress)
        )


@dataclass(eq=False)
class _Entry:
    """One `with lm.patch()` that a thread is in."""

    settings: _Settings
    place: str
    outer: "_Entry | None"
    report: PatchReport = field(default_factory=PatchReport)
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    left: bool = False
    compressing: str | None = None

    def seen(self, op: str, reason: str | None) -> None:
        if _of_coroutine.get() is not self:
            raise RuntimeError("patch: another coroutine of this thread awaits inside a patch")
        if reason is not None:
            self.report.skipped.setdefault(op, {}).setdefault(self.place, reason)
        elif self.place not in self.report.swapped.setdefault(op, []):
            self.report.swapped[op].append(self.place)


_of_thread = threading.local()
_of_coroutine: ContextVar[_Entry | None] = ContextVar("patch", default=None)
_trace_context = jax.make_user_context(None)


def _intercept(entry: _Entry, next_fun, args, kwargs, context):
    if _of_thread.entries[-1] is not entry:  # a patch further inside decides
        return next_fun(*args, **kwargs)
    module, settings, outer = context.module, entry.settings, entry.place
    entry.place = "" if module.scope is None else "/".join(module.path)
    is_call = context.method_name == "__call__"
    swaps = settings.norms and is_call
    try:
        if is_call and settings.compresses(entry.place) and entry.compressing is None:
            entry.seen("compress", None)
            return _compressed_call(entry, module, args, kwargs)
        if swaps:
            swap_norm(context, entry.seen, settings.norm_dtype, settings.norm_residual)
        out = next_fun(*args, **kwargs)
        op = norm_op(module) if swaps else None
        if op is not None and entry.place not in entry.report.swapped.get(op, ()):
            cls = type(module)
            entry.seen(op, f"{cls.__module__}.{cls.__qualname__} has a __call__ of its own")
        return out
    finally:
        entry.place = outer


def _compressed_call(entry: _Entry, module: nn.Module, args, kwargs):
    """The module's call in `lm.compress`: the call again, in a scope of its own."""

    def call(module, *args, **kwargs):
        entry.compressing = entry.place  # what is inside is not compressed once more
        try:
            return module(*args, **kwargs)
        finally:
            entry.compressing = None

    call.__name__ = type(module).__name__
    return compress_module(call, dtype=entry.settings.compress_dtype)(module, *args, **kwargs)


@contextlib.contextmanager
def _patch(settings: _Settings) -> Iterator[PatchReport]:
    entries = _of_thread.__dict__.setdefault("entries", [])
    entry = _Entry(settings, entries[-1].place if entries else "", _of_coroutine.get())
    entry.contexts.enter_context(_trace_context(settings))
    entry.contexts.enter_context(nn.intercept_methods(partial(_intercept, entry)))
    entry.contexts.enter_context(swapped_activations(entry.seen, settings.bits))
    entries.append(entry)
    _of_coroutine.set(entry)
    try:
        yield entry.report
    except TypeError as error:
        if entry.report.swapped and "custom_vjp" in str(error):
            error.add_note(f"lm.patch swapped {', '.join(entry.report.swapped)} for a custom_vjp")
        raise
    finally:
        # Generators may leave in another order than they entered, which JAX and Flax forbid: what
        # is left early goes when all that was entered after it has been left too.
        entry.left = True
        innermost = _of_coroutine.get()
        while innermost and innermost.left:
            innermost = innermost.outer
        _of_coroutine.set(innermost)
        if _of_thread.__dict__.get("entries") is not entries:
            raise RuntimeError("patch: left in another thread than entered, which stays patched")
        while entries and entries[-1].left:
            entries.pop().contexts.close()


def patch(
    function: Callable | None = None,
    /,
    *,
    activations: bool | None = None,
    bits: int = 2,
    norms: bool | None = None,
    norm_dtype: jax.typing.DTypeLike | None = None,
    norm_residual: Residual = "normalized",
    compress: str | Sequence[str] = (),
    compress_dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
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
    - `nn.LayerNorm` for `lm.MSLayerNorm`, `nn.RMSNorm` for `lm.MSRMSNorm`, also where a subclass
      calls them, and the RMSNorms of the Llama, Mistral and Gemma of `transformers`. Not:
      `nnx.LayerNorm`, `nnx.RMSNorm`, norms with an `axis_name`. The report names the linen norms
      that were met and left: classes that are named so and hold no other modules.

    With `compress="encoder/layer/*"`, the calls of the linen modules at these paths are those of
    `lm.compress_module` instead: their values do not change, nor do gelu, silu and norms. Take the
    blocks of the model, one pattern for a kind.

    What counts is where a call is traced: in this thread, inside. A function that was jitted and
    traced outside is traced again when it is called inside, and the other way round, so decorate
    the train step or call it inside; a `jax.jit` inside whose result is called outside is plain.
    A nested `patch` replaces all settings of the outer one until it exits.

    A generator that yields inside leaves its caller patched until it goes on or is closed. A
    coroutine must not await inside: JAX's contexts are a thread's, and the operators of another
    coroutine that is traced meanwhile raise a RuntimeError.

    Args:
      function: what `@lm.patch` decorates: no generator and no coroutine, which run later.
      activations: swap gelu and silu; None: unless `compress` is given.
      bits: that they keep an element, 2 or 4.
      norms: swap LayerNorm and RMSNorm; None: unless `compress` is given.
      norm_dtype: output dtype of the swapped norms, None for the model's own choice. Many
        models leave norms at a float32 output in front of bfloat16 Denses. These keep a bfloat16
        copy, and the norm shares it only with `norm_dtype=jnp.bfloat16`.
      norm_residual: "normalized" or "output", see `residual` of `lm.ms_layer_norm`.
      compress: patterns of module paths, `*` for any part of one name, such as "layers/*".
      compress_dtype: of what these modules keep, see `dtype` of `lm.compress`.

    Returns:
      A context manager for one `with`, which gives a `PatchReport`; also a decorator.

    Raises:
      TypeError: `function` is no function; `activations` or `norms` is not a bool; `norm_dtype`
        is not a floating dtype; `compress` is not of strings.
      ValueError: unknown `bits`, `norm_residual` or `compress_dtype`; nothing to swap.
    """
    if function is not None and not callable(function):
        raise TypeError(f"patch: {function!r} is not accepted, only settings by name")
    patterns = [compress] if isinstance(compress, str) else compress
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"patch: compress={compress!r} is not accepted, only paths of modules")
    check_storage(compress_dtype, "patch: compress_dtype")
    activations = not patterns if activations is None else activations
    norms = not patterns if norms is None else norms
    for name, given in (("activations", activations), ("norms", norms)):
        if not isinstance(given, bool):
            raise TypeError(f"patch: {name}={given!r} is not accepted, only None, True and False")
    if not activations and not norms and not patterns:
        raise ValueError("patch: activations=False and norms=False swap nothing: set one to True")
    if bits not in (2, 4):
        raise ValueError(f"patch: bits={bits!r} is not accepted, only 2 and 4")
    if norm_residual not in RESIDUALS:
        raise ValueError(
            f"patch: norm_residual={norm_residual!r} is not known: "
            f"accepted are {', '.join(map(repr, RESIDUALS))}"
        )
    with contextlib.suppress(TypeError):
        norm_dtype = norm_dtype if norm_dtype is None else jnp.dtype(norm_dtype)
    is_dtype = isinstance(norm_dtype, jnp.dtype)
    if norm_dtype is not None and not (is_dtype and jnp.issubdtype(norm_dtype, jnp.floating)):
        raise TypeError(
            f"patch: norm_dtype={norm_dtype!r} is not accepted, only None and floating dtypes "
            f"such as jnp.bfloat16"
        )
    stored = None if compress_dtype is None else jnp.dtype(compress_dtype)
    swapped = bits if activations else None
    settings = _Settings(swapped, norms, norm_dtype, norm_residual, tuple(patterns), stored)
    patched = _patch(settings)
    return patched if function is None else patched(function)
