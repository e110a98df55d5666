"""`jax.nn.gelu` and `jax.nn.silu` with another body, in the threads that ask for it.

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
import jax.numpy as jnp

from lowmembp_jax.activations import gelu, own_copy, silu
from lowmembp_jax.jax_internals import cache_miss

_thread = threading.local()

# The Python functions; `jax.nn.silu` is one under `jax.jit`.
_gelu: Any = inspect.unwrap(jax.nn.gelu)
_silu: Any = inspect.unwrap(jax.nn.silu)
_plain: Any = {"gelu": own_copy(_gelu), "silu": own_copy(_silu)}
_ours: Any = {"gelu": gelu, "silu": silu}
_silu_missed = cache_miss(jax.nn.silu)
_plain_missed = _silu_missed.cell_contents


def _run(op: str, x, *approximate):
    if (swap := getattr(_thread, "swap", None)) is None:
        return _plain[op](x, *approximate)
    seen, bits = swap
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # such as nnx.Param
        x = x.__jax_array__()
    aval: Any = jax.typeof(x)
    reason = None
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        reason = f"{aval.dtype} input"
    elif aval.weak_type:
        # The result would be strongly typed and promote what it meets.
        reason = "weakly typed input, as Python numbers are"
    seen(op, reason)
    return _plain[op](x, *approximate) if reason else _ours[op](x, *approximate, bits=bits)


# These two lend their bodies, which see the globals of jax.nn and not those of this file.
def _gelu_body(x, approximate=True):
    from lowmembp_jax import patched_activations

    return patched_activations._run("gelu", x, approximate)


def _silu_body(x):
    from lowmembp_jax import patched_activations

    return patched_activations._run("silu", x)


def _missed(*args, **kwargs):
    if getattr(_thread, "swap", None) is None:
        return _plain_missed(*args, **kwargs)
    return _silu(*args, **kwargs), None, False


_lock = threading.Lock()
_inside = 0


def _count(change: int) -> None:
    global _inside
    with _lock:
        _inside += change
        _gelu.__code__ = _gelu_body.__code__ if _inside else _plain["gelu"].__code__
        _silu.__code__ = _silu_body.__code__ if _inside else _plain["silu"].__code__
        _silu_missed.cell_contents = _missed if _inside else _plain_missed


@contextlib.contextmanager
def swapped_activations(
    seen: Callable[[str, str | None], None], bits: int | None
) -> Iterator[None]:
    """Swaps gelu and silu in this thread and tells `seen`; for `bits` None it runs the originals.

    Told are the operator, and why the original runs, None where it is swapped.
    """
    outer = getattr(_thread, "swap", None)
    _thread.swap = None if bits is None else (seen, bits)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _thread.swap = outer
