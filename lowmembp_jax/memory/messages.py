"""Takes messages of XLA about a step that is too large for its device from stderr.

XLA calls it "an error in the calculation" if the arguments and results alone do not fit. A plan
says in a note how large they are.
"""

import contextlib
import os
import re
import threading
from collections.abc import Iterator

import jax

from lowmembp_jax._sizes import array_bytes

#: The part of a GPU's memory that XLA grants a program while it orders its kernels.
GRANTED = 0.8
# After the first message, XLA tries in vain to make the step smaller than its arguments.
_MESSAGES = re.compile(
    rb"The byte size of input/output arguments \(\d+\) exceeds the base limit"
    rb"|hlo_rematerialization.*Can't reduce memory use below"
)

_lock = threading.Lock()
_listening: list["_Stderr"] = []


class _Stderr:
    """Passes on each line that this process writes to stderr, except XLA's about large steps."""

    def __init__(self):
        self.users = 0
        self.stderr = os.dup(2)
        self.lines, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self.thread = threading.Thread(target=self._pass_on, daemon=True)
        self.thread.start()

    def _pass_on(self) -> None:
        with os.fdopen(self.lines, "rb") as lines, os.fdopen(self.stderr, "wb", 0) as stderr:
            for line in lines:
                if not _MESSAGES.search(line):
                    stderr.write(line)

    def stop(self) -> None:
        os.dup2(self.stderr, 2)
        self.thread.join(timeout=1)  # a process that was started meanwhile may go on writing


def may_be_too_large(lowered: jax.stages.Lowered, memory_bytes: int) -> bool:
    """Whether arguments and results are too large if a GPU holds all and nothing is donated."""
    arrays = jax.tree.leaves((lowered.args_info, lowered.out_info))
    return sum(array_bytes(a.shape, a.dtype) for a in arrays) > GRANTED * memory_bytes


@contextlib.contextmanager
def taken_from_stderr() -> Iterator[None]:
    """Takes the messages from stderr. Programs compile in several threads, which share stderr.

    Use it only for steps that may be too large: if XLA aborts the process meanwhile, its last words
    can be lost.
    """
    with _lock:
        if not _listening:
            _listening.append(_Stderr())
        own = _listening[0]
        own.users += 1
    try:
        yield
    finally:
        with _lock:
            own.users -= 1
            if not own.users:
                _listening.remove(own)
                own.stop()
