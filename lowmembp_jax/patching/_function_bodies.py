"""Replaces the bodies of some functions of JAX and Flax, in the threads that ask for it.

Third-party code refers to these functions in too many places to replace their names:
`from flax.linen import gelu`, `partial(nn.gelu, approximate=False)` in a dictionary, a default
of a module's field, a closure. So this module keeps the function objects and replaces their bodies,
`__code__`, while any thread is inside a patch. In all other threads the new body runs the old one.

`jax.nn.silu` is jitted. In threads inside a patch its body runs at each call, as gelu's does.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import jax

from lowmembp_jax._jax_internals import cache_miss
from lowmembp_jax.operators.activations import own_copy
from lowmembp_jax.patching._replacements import TABLE

#: Takes the operator's name, the original function and the arguments.
Handler = Callable[..., Any]

_thread = threading.local()


def _run(op: str, *args, **kwargs):
    plain = _PLAIN[op]
    handler = getattr(_thread, "handler", None)
    if handler is None:
        return plain(*args, **kwargs)
    given = inspect.signature(plain).bind(*args, **kwargs)
    given.apply_defaults()
    return _handled(given.args[0], handler, op, plain, *given.args[1:], **given.kwargs)


def _handled(first: Any, handler: Handler, op: str, plain: Callable, *args, **kwargs):
    # `running_modules` finds one of NNX's norms by the first argument of a frame.
    return handler(op, plain, first, *args, **kwargs)


def _body(*args, **kwargs):
    # JAX and Flax run this with their own globals, and "an operator" is replaced by its name.
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("an operator", *args, **kwargs)


def _body_of(op: str) -> CodeType:
    constants = (op if one == "an operator" else one for one in _body.__code__.co_consts)
    return _body.__code__.replace(co_consts=tuple(constants))


# `jax.grad` calls `jax.vjp`.
_FUNCTIONS: dict[str, Any] = {op: row.function for op, row in TABLE.items()}
_FUNCTIONS["vjp"] = inspect.unwrap(jax.vjp)
_PLAIN: dict[str, Any] = {op: own_copy(function) for op, function in _FUNCTIONS.items()}
_OURS = {op: _body_of(op) for op in _FUNCTIONS}
_silu_missed = cache_miss(jax.nn.silu)
_plain_missed = _silu_missed.cell_contents


def _missed(*args, **kwargs):
    if getattr(_thread, "handler", None) is None:
        return _plain_missed(*args, **kwargs)
    return _FUNCTIONS["silu"](*args, **kwargs), None, False


_lock = threading.Lock()
_inside = 0


def _count(change: int) -> None:
    global _inside
    with _lock:
        _inside += change
        for op, function in _FUNCTIONS.items():
            function.__code__ = _OURS[op] if _inside else _PLAIN[op].__code__
        _silu_missed.cell_contents = _missed if _inside else _plain_missed


@contextlib.contextmanager
def exchanged(handler: Handler) -> Iterator[None]:
    """Sends this thread's calls of gelu, silu, NNX's norms and `jax.vjp` to `handler`."""
    outer = getattr(_thread, "handler", None)
    _thread.handler = handler
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _thread.handler = outer
