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
from typing import Any

import jax
from flax import nnx

from lowmembp_jax._jax_internals import cache_miss
from lowmembp_jax.operators.activations import own_copy

#: Takes the operator's name, the original function and the arguments.
Handler = Callable[..., Any]

_thread = threading.local()


def _run(op: str, *args, **kwargs):
    plain = _PLAIN[op]
    handler = getattr(_thread, "handler", None)
    return plain(*args, **kwargs) if handler is None else handler(op, plain, *args, **kwargs)


# JAX and Flax run these bodies with their own globals, so each body imports this file.
def _gelu(x, approximate=True):
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("gelu", x, approximate)


def _silu(x):
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("silu", x)


def _layer_norm(self, x, *, mask=None):
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("layer_norm", self, x, mask=mask)


def _rms_norm(self, x, mask=None):
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("rms_norm", self, x, mask=mask)


def _vjp(fun, *primals, **kwargs):
    from lowmembp_jax.patching import _function_bodies

    return _function_bodies._run("vjp", fun, *primals, **kwargs)


# The undecorated functions: `jax.nn.silu` is inside `jax.jit`. `jax.grad` calls `jax.vjp`.
_EXCHANGED: dict[str, tuple[Any, Any]] = {
    "gelu": (inspect.unwrap(jax.nn.gelu), _gelu),
    "silu": (inspect.unwrap(jax.nn.silu), _silu),
    "layer_norm": (inspect.unwrap(nnx.LayerNorm.__call__), _layer_norm),
    "rms_norm": (inspect.unwrap(nnx.RMSNorm.__call__), _rms_norm),
    "vjp": (inspect.unwrap(jax.vjp), _vjp),
}
_PLAIN: dict[str, Any] = {op: own_copy(function) for op, (function, _) in _EXCHANGED.items()}
_silu_missed = cache_miss(jax.nn.silu)
_plain_missed = _silu_missed.cell_contents


def _missed(*args, **kwargs):
    if getattr(_thread, "handler", None) is None:
        return _plain_missed(*args, **kwargs)
    return _EXCHANGED["silu"][0](*args, **kwargs), None, False


_lock = threading.Lock()
_inside = 0


def _count(change: int) -> None:
    global _inside
    with _lock:
        _inside += change
        for op, (function, ours) in _EXCHANGED.items():
            function.__code__ = (ours if _inside else _PLAIN[op]).__code__
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
