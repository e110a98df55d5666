"""Warnings that point to the line of the user's code."""

import os
import sys
import warnings

import flax
import jax

# Frames of these packages lie between the user's call and the code that warns.
_PACKAGES = tuple(
    os.path.dirname(file) + os.sep for file in (__file__, jax.__file__, flax.__file__) if file
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first line outside this library, JAX and Flax."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
