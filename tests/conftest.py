"""Strict JAX for every test: no implicit promotion, warnings are errors, 8 CPU devices."""

import functools
import os
import tempfile
from importlib.metadata import version

# Before JAX starts. The GPU compiler's wheels are found without a GPU, see memory/devices.py.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
if version("jaxlib").startswith("0.10."):
    # Tests compile much and compute little. Without these optimizations, tests of kernels that
    # agree bit for bit fail with later versions.
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )
if version("jaxlib").startswith("0.11."):
    # Its LLVM aborts at a comparison of Pallas's interpreted kernels in bfloat16 on AVX-512.
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX2"

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

# Programs for a GPU share most kernels: each goes through LLVM and ptxas once.
_kernels = tempfile.TemporaryDirectory(prefix="lowmembp_tests-")
os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={_kernels.name}/cache"

_cpu_seconds = lambda: sum(os.times()[:4])  # noqa: E731
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--most-seconds", type=float, help="fail default tests that take longer")


def pytest_configure(config):
    # JAX 0.11 and later, where a kernel is lowered: see pallas_kernels/flat.py.
    warning = "The Pallas Triton backend is deprecated:DeprecationWarning"
    config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m`
def pytest_collection_modifyitems(config, items):
    # What is slow runs where `-m` is empty or names it. `-m compiled` leaves it out.
    if config.option.markexpr and "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    missing = lm.memory.missing_wheels()
    skip = pytest.mark.skip(reason=f"no GPU compiler: {', '.join(missing)} not installed")
    for item in items:
        mark = item.get_closest_marker("compiled")
        if missing and mark and mark.args != ("tpu",):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a default test that takes too long.

    Counts CPU time, also of child processes that have ended: wall time grows on a busy machine.
    """
    start = _cpu_seconds()
    result = yield
    most, seconds = item.config.option.most_seconds, _cpu_seconds() - start
    is_default = not any(map(item.get_closest_marker, ("compiled", "docs", "slow")))
    if most and is_default and seconds > most and (seconds := seconds / _slowness()) > most:
        pytest.fail(f"{item.nodeid} takes {seconds:.1f} s of CPU time, more than {most:g} s")
    return result


def _slowness():
    """How much longer a program takes to compile now than the 0.2 s of our 2 cores with 0.10."""
    start, x = _cpu_seconds(), jnp.ones((8, 8))
    chain = lambda x: functools.reduce(lambda h, _: jnp.sin(h) @ h, range(30), x).sum()  # noqa: E731
    jax.jit(jax.grad(chain)).lower(x).compile()
    return max(1, (_cpu_seconds() - start) / 0.2)


pytest_runtest_setup = pytest_runtest_call


@pytest.fixture(autouse=True, scope="module")
def small_caches():
    """What JAX keeps of one file's programs is gigabytes in the end, and no use to the next."""
    yield
    jax.clear_caches()


@pytest.fixture
def mixed_dtypes():
    """Flax's own norms mix float32 with 16 and with 64 bits."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def jax_defaults(mixed_dtypes):
    """Those of users, under which commands run."""
    with jax.numpy_rank_promotion("allow"):
        yield
