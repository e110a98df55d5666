"""Which files of a program its user did not write."""

import runpy
import sysconfig

import flax.linen
import jax
import optax
import pytest

import lowmembp_jax as lm
from lowmembp_jax._source_files import is_framework


@pytest.mark.parametrize("module", [jax, flax.linen, optax, runpy, lm.memory])
def test_frameworks(module):
    assert is_framework(module.__file__)


def test_a_package_of_others_is_not_pythons_own():
    """Without a virtual environment it is in a folder of Python's library."""
    library = sysconfig.get_path("stdlib")
    assert is_framework(f"{library}/contextlib.py") and is_framework("<frozen runpy>")
    assert not is_framework(f"{library}/site-packages/transformers/models/modeling_flax_bert.py")
    assert not is_framework(f"{library}/dist-packages/jax_but_another/model.py")
    assert not is_framework(__file__)
