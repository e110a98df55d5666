"""Which files of a program its user did not write."""

import functools
import importlib.util
import os
import sysconfig

_PACKAGES = (
    *("jax", "jaxlib", "jax_triton", "flax", "optax", "qwix"),
    *("lowmembp_jax", "pallas_kernels"),
)
_ROOTS = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in map(importlib.util.find_spec, _PACKAGES)
    if spec is not None and spec.origin is not None
)
# Python's own library, console scripts, and what `runpy` runs.
_PYTHON = (*(sysconfig.get_path(name) + os.sep for name in ("scripts", "stdlib")), "<frozen ")


@functools.cache
def is_framework(path: str) -> bool:
    """Whether it is JAX's, Flax's and their like, ours, or Python's own."""
    # Without a virtual environment, this folder is in that of Python's library.
    _, installed, rest = path.rpartition("-packages/")
    return rest.split("/")[0] in _PACKAGES if installed else path.startswith(_ROOTS + _PYTHON)
