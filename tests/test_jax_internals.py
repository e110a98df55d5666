"""What the library uses of JAX that is not public, with the version of JAX that runs this."""

import inspect
import re
from pathlib import Path

import jax
import pytest
from jax import lax

import lowmembp_jax
import pallas_kernels
from lowmembp_jax import _jax_internals as jax_internals


def test_it_is_in_one_file():
    private = re.compile(r"jax[./]_src|_check_vma|manual_axis_type|_cache_miss")
    files = [
        f for p in (lowmembp_jax, pallas_kernels) for f in Path(p.__file__).parent.rglob("*.py")
    ]
    found = [file.name for file in files if private.search(file.read_text())]
    assert found == ["_jax_internals.py"]


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (jax.nn.gelu, jax_internals.WHOLE),
        (lax.dot_general, jax_internals.FUNCTIONS),
        (lax.scan, jax_internals.SOURCE),
    ],
)
def test_files_of_jax(function, pattern):
    file = inspect.unwrap(function).__code__.co_filename
    assert re.search(pattern, file)
    assert jax_internals.SOURCE in file
    assert function is not lax.scan or not re.search(jax_internals.FUNCTIONS, file)
