"""`jax.nn.gelu` and `jax.nn.silu` with another body, in the threads that ask for it.

Third-party code holds on to these functions in too many places to replace their names:
`from flax.linen import gelu`, `partial(nn.gelu, approximate=False)` in a dictionary, a default
of a module's field, a closure. So the function objects stay what they are, and their bodies,
`__code__`, are exchanged while any thread asks. The new body runs the old one in other threads.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lowmembp_jax.activations import own_copy, regelu2, resilu2

#: Is told of every call: operator, and why the original runs, None where it is swapped.
Seen = Callable[[str, str | None], None]


class _Thread(threading.local):
    seen: Seen | None = None


_thread = _Thread()

# The Python functions; `jax.nn.silu` is one under `jax.jit`.
_gelu: Any = inspect.unwrap(jax.nn.gelu)
_silu: Any = inspect.unwrap(jax.nn.silu)


_plain_gelu, _plain_silu = own_copy(_gelu), own_copy(_silu)


def _swaps(op: str, x) -> bool:
    if _thread.seen is None:
        return False
    aval: Any = jax.typeof(x)
    reason = None
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        reason = f"complex input, {aval.dtype}"
    elif aval.weak_type:
        # The result would be strongly typed and promote what it meets.
        reason = "weakly typed input, as Python numbers are"
    _thread.seen(op, reason)
    return reason is None


def _run_gelu(x, approximate):
    if not _swaps("gelu", x):
        return _plain_gelu(x, approximate)
    return regelu2(x, approximate)


def _run_silu(x):
    if not _swaps("silu", x):
        return _plain_silu(x)
    return resilu2(x)


# These two lend their bodies, which see the globals of jax.nn and not those of this file.
def _gelu_body(x, approximate=True):
    from lowmembp_jax import patched_activations

    return patched_activations._run_gelu(x, approximate)


def _silu_body(x):
    from lowmembp_jax import patched_activations

    return patched_activations._run_silu(x)


_BODIES = [
    (_gelu, _gelu.__code__, _gelu_body.__code__),
    (_silu, _silu.__code__, _silu_body.__code__),
]
_lock = threading.Lock()
_inside = 0


def _count(change: int) -> None:
    global _inside
    with _lock:
        _inside += change
        for function, original, other in _BODIES:
            function.__code__ = other if _inside else original


@contextlib.contextmanager
def swapped_activations(seen: Seen | None) -> Iterator[None]:
    """Swaps gelu and silu in this thread and tells `seen`; None runs the originals."""
    outer, _thread.seen = _thread.seen, seen
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _thread.seen = outer
