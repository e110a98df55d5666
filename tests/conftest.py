"""Strict JAX for every test: no implicit promotion, warnings are errors, 8 CPU devices."""

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
import pytest

import lowmembp_jax as lm

# Programs for a GPU share most kernels: each goes through LLVM and ptxas once.
_kernels = tempfile.TemporaryDirectory(prefix="lowmembp_tests-")
os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={_kernels.name}/cache"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    # JAX 0.11 and later, where a kernel is lowered: see pallas_kernels/flat.py.
    warning = "The Pallas Triton backend is deprecated:DeprecationWarning"
    config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    sampled = {}
    for item in items:
        if mark := item.get_closest_marker("sample"):
            key = item.parent, getattr(item, "originalname", item.name)
            sampled.setdefault((key, mark.args[0]), []).append(item)
    for (_, count), cases in sampled.items():
        cases = [case for case in cases if case.get_closest_marker("slow") is None]
        # One case of each of `count` equal parts, at a varying place in it. Otherwise one parameter
        # would often have the same value in all of them.
        count = min(count, len(cases))
        by_default = {int((i + i * 0.618 % 1) * len(cases) / count) for i in range(count)}
        for number in set(range(len(cases))) - by_default:
            cases[number].add_marker(pytest.mark.slow)
    if missing := lm.memory.missing_wheels():
        skip = pytest.mark.skip(reason=f"no GPU compiler: {', '.join(missing)} not installed")
        for item in items:
            if item.get_closest_marker("gpu_compiler"):
                item.add_marker(skip)


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
