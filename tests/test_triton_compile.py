"""The Triton kernels compiled for GPUs, with none present: registers, spills, width of accesses."""

import importlib.util
import re
import subprocess

import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

from pallas_kernels.step_table import FUNCTIONS
from pallas_kernels.triton import flat, rows
from pallas_kernels.triton.launch import BACKEND_OPTIONS

pytestmark = pytest.mark.compiled
TARGETS = (pytest.param(80, marks=pytest.mark.slow), 90, 100)
THRESHOLDS, LEVELS = (-3.2, 0.0, 3.2), (0.0, -0.05, 1.05, 1.0)
ROWS = 8192
POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "uint8": "*u8", "uint16": "*u16"}
FOUR_BITS = lm.STEP_TABLES["gelu_erf", 4]


def _activation(size, dtype, function, thresholds=THRESHOLDS):
    launch = flat.activation_forward_launch(size, jnp.dtype(dtype), function, thresholds)
    return launch, [dtype]


def _activation_backward(size, dtype, levels=LEVELS):
    return flat.activation_backward_launch(size, jnp.dtype(dtype), levels), ["uint8", dtype]


def _gated(size, dtype, function, arrays):
    return flat.gated_launch(size, jnp.dtype(dtype), function, arrays), [dtype] * arrays


def _norm(width, dtype, affine):
    options = {"scale": affine, "bias": affine, "keep_normalized": affine}
    options |= {"center": True, "epsilon": 1e-6}
    launch = rows.forward_launch(ROWS, width, jnp.dtype(dtype), **options)
    return launch, [dtype, "float32", "float32"]


def _norm_backward(width, dtype, bias, recover=False, scale=True, height=ROWS):
    options = {"scale": scale, "bias": bias, "center": bias or not scale, "recover": recover}
    launch = rows.backward_launch(1, height, width, jnp.dtype(dtype), **options)
    return launch, [dtype, "float32", dtype, "float32", "float32"]


def _cases(dtype):
    cases = {
        "gated-backward-odd": _gated(128 * 1001, dtype, "silu", 3),
        "silu-odd": _activation(128 * 1001, dtype, "silu"),
        "gelu_erf-4-bits": _activation(2**24, dtype, "gelu_erf", FOUR_BITS.thresholds),
        "activation-backward-4-bits": _activation_backward(2**24, dtype, FOUR_BITS.levels),
        "activation-backward": _activation_backward(2**24, dtype),
        "norm-backward-affine-8192": _norm_backward(8192, dtype, True),
        "rms-backward-affine-8192": _norm_backward(8192, dtype, False),
        "norm-backward-recover-4096": _norm_backward(4096, dtype, True, True),
    }
    for function in FUNCTIONS:
        cases[function] = _activation(2**24, dtype, function)
        cases[f"gated-{function}"] = _gated(2**24, dtype, function, 2)
        cases[f"gated-backward-{function}"] = _gated(2**24, dtype, function, 3)
    for width in (768, 1023, 4096, 16384):
        cases[f"norm-{width}"] = _norm(width, dtype, False)
        cases[f"norm-affine-{width}"] = _norm(width, dtype, True)
        cases[f"norm-backward-{width}"] = _norm_backward(width, dtype, False, scale=False)
        if width <= 8192:
            cases[f"norm-backward-affine-{width}"] = _norm_backward(width, dtype, True)
    return {f"{name}-{dtype}": case for name, case in cases.items()}


CASES = _cases("bfloat16") | _cases("float32")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def _compile(launch, inputs, target):
    types = [POINTERS[name] for name in inputs]
    types += [POINTERS[output.dtype.name] for output in launch.outputs]
    names = launch.kernel.arg_names
    assert names[len(types) :] == [name for name in names if name in launch.constants]
    assert set(names[len(types) :]) == set(launch.constants)
    source = ASTSource(
        launch.kernel,
        signature=dict(zip(names, types, strict=False))
        | dict.fromkeys(launch.constants, "constexpr"),
        constexprs=launch.constants,
        # As jax-triton: XLA's buffers are aligned.
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    options = {"num_warps": launch.num_warps, **BACKEND_OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _resources(compiled, tmp_path):
    """Registers a thread, and bytes of stack and of local memory."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}


def _access_bytes(ptx):
    """Bytes of every global load, store and asynchronous copy in the program."""
    plain = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global[^\[]*\[[^]]*\], *\[[^]]*\], *(\w+)", ptx)
    return [int(n or 1) * int(bits) // 8 for n, bits in plain] + [int(n, 0) for n in copies]


@pytest.mark.parametrize("target", TARGETS, ids="sm_{}".format)
@pytest.mark.parametrize("case", CASES)
def test_no_spills_and_wide_accesses(case, target, tmp_path):
    launch, inputs = CASES[case]
    compiled = _compile(launch, inputs, target)
    used = _resources(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert not re.search(r"(ld|st)\.local", compiled.asm["ptx"])
    # All programs that `rows` counts on are resident at once.
    if "PROGRAMS" in launch.constants:
        assert used["REG"] <= 128
    # Codes and rstd are what is narrow: an eighth of the bytes at most.
    if "1023" not in case:
        accesses = _access_bytes(compiled.asm["ptx"])
        narrow = sum(size for size in accesses if size < 16)
        assert accesses and narrow <= sum(accesses) / 8, accesses


LARGE = {
    "activation": _activation(2**33 + 128, "bfloat16", "silu"),
    "activation-backward": _activation_backward(2**33 + 128, "bfloat16"),
    "gated": _gated(2**33 + 128, "bfloat16", "silu", 2),
    "gated-backward": _gated(2**33 + 128, "bfloat16", "silu", 3),
    "norm-backward": _norm_backward(512, "bfloat16", False, scale=False, height=2**25),
    "norm-backward-affine": _norm_backward(512, "bfloat16", True, height=2**25),
}


@pytest.mark.parametrize("case", LARGE)
def test_offsets_have_64_bits(case):
    launch, inputs = LARGE[case]
    ttir = _compile(launch, inputs, 90).asm["ttir"]
    program = re.search(r"(%\w+) = tt.get_program_id x", ttir)[1]
    assert re.search(rf"arith.extsi {program} : i32 to i64", ttir)
    assert not re.search(rf"arith.\w+i {program},", ttir)


def test_rows_that_are_too_long_for_registers_are_refused():
    assert _norm_backward(8192, "float32", True, True)
    with pytest.raises(ValueError, match="kept: expected rows of up to 8192 columns in Triton"):
        _norm_backward(8193, "float32", True)
    with pytest.raises(ValueError, match="x: expected rows of up to 16384 columns in Triton"):
        _norm(20000, "float32", True)
