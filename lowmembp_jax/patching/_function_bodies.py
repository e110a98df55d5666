"""Functions of JAX and Flax with another body, in the threads that ask for it.

Third-party code holds on to these functions in too many places to replace their names:
`from flax.linen import gelu`, `partial(nn.gelu, approximate=False)` in a dictionary, a default
of a module's field, a closure. So the function objects stay what they are, and their bodies,
`__code__`, are exchanged while any thread asks. The new body runs the old one in other threads.

`jax.nn.silu` is jitted: in the threads that ask, its body runs at each call, as gelu's does.
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

#: Takes the operator, the function as it was, and the arguments.
Handler = Callable[..., Any]

_thread = threading.local()


def _run(op: str, *args, **kwargs):
    plain = _PLAIN[op]
    handler = getattr(_thread, "handler", None)
    return plain(*args, **kwargs) if handler is None else handler(op, plain, *args, **kwargs)


# These lend their bodies, which see the globals of JAX and Flax and not those of this file.
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


# The Python functions; `jax.nn.silu` is one under `jax.jit`.
_EXCHANGED: dict[str, tuple[Any, Any]] = {
    "gelu": (inspect.unwrap(jax.nn.gelu), _gelu),
    "silu": (inspect.unwrap(jax.nn.silu), _silu),
    "layer_norm": (inspect.unwrap(nnx.LayerNorm.__call__), _layer_norm),
    "rms_norm": (inspect.unwrap(nnx.RMSNorm.__call__), _rms_norm),
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
    """Calls of gelu, silu, `nnx.LayerNorm` and `nnx.RMSNorm` in this thread run `handler`."""
    outer = getattr(_thread, "handler", None)
    _thread.handler = handler
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _thread.handler = outer
