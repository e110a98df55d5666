"""The scripts import each other as `python examples/NAME.py` does, and run under JAX's defaults."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from run import exit_status


@pytest.fixture(autouse=True)
def users_defaults():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def tiny():
    """Returns the folder of a tiny Hugging Face checkpoint."""
    return lambda name: Path(__file__).parents[1] / "data" / "hf_tiny" / name


@pytest.fixture
def call(monkeypatch):
    """Runs a script's command line in this process; returns its exit status."""

    def call(command, config, *options):
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, options)])
        return exit_status(command, config)

    return call
