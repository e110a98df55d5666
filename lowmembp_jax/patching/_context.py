"""The state of one `with lm.patch()`, and what it does with each call of a module.

`_function_bodies` swaps activations and NNX norms. `nn.intercept_methods` reaches the `__call__` of
every linen module. All state here is thread-local.

The settings are part of JAX's trace context (`jax.make_user_context`), so JAX's caches of traces
and programs have them in their keys. JAX never reuses a trace from inside a patch outside of it, or
the reverse.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from lowmembp_jax._contexts import is_exact
from lowmembp_jax._jax_internals import is_differentiated
from lowmembp_jax.linen import compress_module
from lowmembp_jax.patching._calling_modules import (
    attribute_path,
    linen_kernels,
    nnx_kernels,
    running_modules,
)
from lowmembp_jax.patching._checkpoints import compressed_vjp
from lowmembp_jax.patching._function_bodies import exchanged
from lowmembp_jax.patching._replacements import (
    class_name,
    linen_norm,
    named_norm,
    own_activations,
    own_nnx_norms,
    swap_activation,
    swap_linen_norm,
    swap_nnx_norm,
)
from lowmembp_jax.patching._report import PatchReport
from lowmembp_jax.patching._settings import ACTIVATIONS, NORMS, Settings


@dataclass(eq=False)
class _Entry:
    """One `with lm.patch()` that a thread has entered."""

    settings: Settings
    module: nn.Module | None  # the innermost linen module that is running
    outer: "_Entry | None"
    report: PatchReport = field(default_factory=PatchReport)
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    left: bool = False
    compressing: str | None = None
    called: dict[str, None] = field(default_factory=dict)  # the paths of modules
    differentiating: bool = False
    nnx_root: nnx.Module | None = None

    @property
    def place(self) -> str:
        """The path of the linen or NNX module whose method is running."""
        if self.module is None:
            return attribute_path(running_modules())
        return "" if self.module.scope is None else "/".join(self.module.path)

    def add_called(self) -> None:
        """Adds the path of the running module, and the paths of those around it."""
        names = self.place.split("/")
        self.called |= dict.fromkeys("/".join(names[: end + 1]) for end in range(len(names)))

    def check_coroutine(self) -> None:
        if _of_coroutine.get() is not self:
            raise RuntimeError(
                "patch: another coroutine of this thread awaits inside a patch: leave the patch "
                "before you await"
            )

    def seen(self, op: str, reason: str | None, *call: Any) -> None:
        self.check_coroutine()
        modules = [self.module] if self.module is not None else running_modules()
        if modules and not self.place:
            self.report.model = type(modules[0]).__name__
        self.report.add(op, self.place, reason, *call)

    def vjp(self, plain: Callable, fun: Any, *primals: Any, **kwargs: Any) -> Any:
        """Runs `jax.vjp`; a gradient that is differentiated again is plain."""
        settings = self.settings
        if not settings.checkpoint or self.differentiating or is_differentiated():
            return plain(fun, *primals, **kwargs)
        self.check_coroutine()
        self.differentiating = True
        try:
            with _trace_context(replace(settings, checkpoint=False)):
                formats: dict[str | None, str | None] = {None: settings.compress_dtype}
                add = self.report.add_function
                return compressed_vjp(plain, formats, add, fun, *primals, **kwargs)
        finally:
            self.differentiating = False

    def exchanged(self, op: str, plain: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of gelu, silu, an NNX norm (x is the module) or `jax.vjp` (a function)."""
        settings = self.settings
        if op == "vjp":
            return self.vjp(plain, x, *args, **kwargs)
        if is_exact() or not settings.ops:
            return plain(x, *args, **kwargs)
        modules = running_modules() if self.module is None else []
        if modules and self.nnx_root is not modules[-1]:
            self.nnx_root = modules[-1]
            for norm, place, reason in own_nnx_norms(self.nnx_root):
                if norm in settings.ops:
                    self.report.add(norm, place, reason)
        if modules:
            self.add_called()
        if op not in settings.ops:
            return plain(x, *args, **kwargs)
        if reason := settings.why_not(op, self.place):
            self.seen(op, reason)
            return plain(x, *args, **kwargs)
        if op in NORMS:
            return swap_nnx_norm(op, plain, self.seen, settings, x, *args, **kwargs)
        kernels = nnx_kernels(modules) if self.module is None else linen_kernels(self.module)
        return swap_activation(op, plain, self.seen, settings.bits, kernels, x, *args)


_of_thread = threading.local()
_of_coroutine: ContextVar[_Entry | None] = ContextVar("patch", default=None)
_trace_context = jax.make_user_context(None)


def _intercept(entry: _Entry, next_fun, args, kwargs, context):
    # If patches are nested, the innermost one decides.
    if _of_thread.entries[-1] is not entry or is_exact():
        return next_fun(*args, **kwargs)
    module, settings, outer = context.module, entry.settings, entry.module
    entry.module = module
    is_call = context.method_name == "__call__"
    if is_call:
        entry.add_called()
    try:
        if is_call and settings.compresses(entry.place) and entry.compressing is None:
            entry.seen("compress", None)
            return _compressed_call(entry, module, args, kwargs)
        op = linen_norm(context) if is_call else None
        reason = op and settings.why_not(op, entry.place)
        if op in settings.ops and not reason:
            swap_linen_norm(context, entry.seen, settings)
        out = next_fun(*args, **kwargs)
        op = op or (named_norm(module) if is_call else None)
        if op in settings.ops and entry.place not in entry.report.swapped.get(op, ()):
            entry.seen(op, reason or f"{class_name(module)} has its own __call__")
        if is_call and settings.ops.intersection(ACTIVATIONS):
            for name, reason in own_activations(module).items():
                entry.seen(name, reason)
        return out
    finally:
        entry.module = outer


def _compressed_call(entry: _Entry, module: nn.Module, args, kwargs):
    """Calls the module again, inside `lm.compress` and in its own scope."""

    def call(module, /, *args, **kwargs):
        entry.compressing = entry.place  # modules inside are not compressed a second time
        try:
            return module(*args, **kwargs)
        finally:
            entry.compressing = None

    call.__name__ = type(module).__name__
    return compress_module(call, dtype=entry.settings.compress_dtype)(module, *args, **kwargs)


class Patch(contextlib._GeneratorContextManager):
    """The context of `lm.patch`, which is also a decorator."""

    def __init__(self, settings: Settings):
        super().__init__(_patched, (settings,), {})

    def _recreate_cm(self):
        return Patch(*self.args)

    def __call__(self, function: Any) -> Any:
        later = (
            inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction,
        )  # fmt: skip
        if not callable(function) or any(is_kind(function) for is_kind in later):
            raise TypeError(
                f"patch: function: expected a function that is neither a generator nor a "
                f"coroutine, because these run after the patch, got {function!r}; pass settings by "
                f"name"
            )
        return super().__call__(function)


def _patched(settings: Settings) -> Generator[PatchReport, None, None]:
    """Applies `settings` until the context exits, and gives the report."""
    entries = _of_thread.__dict__.setdefault("entries", [])
    entry = _Entry(settings, entries[-1].module if entries else None, _of_coroutine.get())
    entry.contexts.enter_context(_trace_context(settings))
    entry.contexts.enter_context(nn.intercept_methods(partial(_intercept, entry)))
    entry.contexts.enter_context(exchanged(entry.exchanged))
    entries.append(entry)
    _of_coroutine.set(entry)
    try:
        yield entry.report
    except TypeError as error:
        if entry.report.swapped and "custom_vjp" in str(error):
            error.add_note(f"lm.patch swapped {', '.join(entry.report.swapped)} for a custom_vjp")
        raise
    else:
        settings.check_patterns(list(entry.called))
    finally:
        # Generators may leave in another order than they entered, which JAX and Flax forbid. An
        # entry that is left early is closed once all entries after it have been left too.
        entry.left = True
        innermost = _of_coroutine.get()
        while innermost and innermost.left:
            innermost = innermost.outer
        _of_coroutine.set(innermost)
        if _of_thread.__dict__.get("entries") is not entries:
            raise RuntimeError(
                "patch: left in another thread than it was entered in: the first thread stays "
                "patched; enter and leave in one thread"
            )
        while entries and entries[-1].left:
            entries.pop().contexts.close()
