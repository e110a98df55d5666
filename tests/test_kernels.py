"""The kernels of Pallas and Triton in their interpreters, on the CPU, and how they are chosen.

XLA compiles those of Pallas for every target with no GPU: they lower, and add no copies.

test_activations.py, test_gated.py and test_normalization.py have what the operators need of them.

In Triton's interpreter every launch (kernel, grid, blocks) is the one that a GPU would get. Two
things are the interpreter's: it rounds to bfloat16 towards zero, and its exp2 and rsqrt are exact.
"""

import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, only_interpreted, python

import lowmembp_jax as lm
from pallas_kernels import interface, step_table
from pallas_kernels.interface import activation_backward, activation_forward, norm_backward


@pytest.mark.slow
@pytest.mark.parametrize("name", ["activations", "gated", "normalization", "kernels"])
def test_triton(name):
    """Runs a file's tests of Triton in a process of its own: the variable acts on the import."""
    for package in ("triton", "torch"):
        pytest.importorskip(package)
    file = Path(__file__).with_name(f"test_{name}.py")
    options = ("-q", "-p", "no:cacheprovider", "-n", "0", "-k", "Triton and not missing")
    done = python("-m", "pytest", *options, file, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_erfc_is_that_of_jax():
    x = np.linspace(-11, 11, 200_001, dtype=np.float32)
    actual = jax.jit(step_table.erfc)(x)
    np.testing.assert_array_equal(actual, jax.jit(jax.lax.erfc)(x))
    exact = np.array([math.erfc(float(value)) for value in x[::10]])
    ulps = np.abs(np.asarray(actual, np.float64)[::10] - exact) / np.spacing(np.float32(exact))
    assert ulps[x[::10] < 0].max() < 1.5
    # 1 - erf(x) cancels, and exp amplifies the rounding of x^2: XLA's own expansion is no better.
    assert ulps[x[::10] < 4].max() < 11


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("triton", marks=only_interpreted)]
)
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "center"),
    [(203, 24, "float32", True), (5, 8100, "float32", True), (1001, 100, "bfloat16", False)],
)
def test_gradients_of_many_programs(rows, width, dtype, center, recover, cores, implementation):
    """As many partial sums as a device has room for, whose rows they share, some of them none.

    LayerNorm has a bias, and RMSNorm has none.
    """
    y, g = (normal(rows, width, key=key, dtype=dtype) for key in (0, 1))
    scale, bias = 1 + normal(2, width, key=2, dtype=dtype) / 5
    kept = y * scale[None] + (bias[None] if center else 0) if recover else y
    options = {"center": center, "x_dtype": y.dtype, "recover": recover, "cores": cores}
    arguments = kept, jnp.ones(rows), g, scale, bias if center else None
    got = norm_backward(*arguments, **options, implementation=implementation)
    kept, g, scale, bias = (np.asarray(x, np.float64) for x in (kept, g, scale, bias))
    y = (kept - bias * center) / scale if recover else kept
    along = g * scale
    dx = along - center * along.mean(1, keepdims=True) - y * (along * y).mean(1, keepdims=True)
    bound = (4 if dtype == "float32" else 1) * float(jnp.finfo(dtype).eps)
    for actual, expected in zip(got, (dx, np.sum(y * g, 0), np.sum(g, 0)), strict=True):
        if actual is not None:
            assert actual.dtype == dtype
            assert lm.gradient_distance(np.float64(actual), expected).error < bound
    assert (got[2] is not None) == center


@only_interpreted
class TestTriton:
    @pytest.mark.parametrize("function", ["gelu_tanh", "gelu_erf", "silu"])
    def test_activation_is_accurate_where_one_plus_tanh_would_cancel(self, function):
        x = np.linspace(-9, 9, 4001, dtype=np.float32)
        y = activation_forward(x, function, (0.0,), implementation="triton")[0]
        x = np.float64(x)
        cubic = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        expected = {
            "gelu_erf": 0.5 * x * np.vectorize(math.erfc)(-x * np.sqrt(0.5)),
            "gelu_tanh": x / (1 + np.exp(-cubic)),
            "silu": x / (1 + np.exp(-x)),
        }[function]
        near = np.abs(x) < 5
        np.testing.assert_allclose(y[near], expected[near], rtol=3e-6)
        np.testing.assert_allclose(y, expected, rtol=2e-5)

    @pytest.mark.parametrize("size", [96, 33], ids=["folded", "looped"])
    def test_vmap_of_activations(self, size):
        x = 4 * np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
        x.flat[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30
        thresholds, levels = (0.0, 1.0), (0.5, 1.0, 2.0)

        def forward(x):
            return activation_forward(x, "silu", thresholds, implementation="triton")[1]

        packed = jax.vmap(forward)(x)
        for i, row in enumerate(x):
            np.testing.assert_array_equal(packed[i], forward(row))
        run = functools.partial(activation_backward, levels=levels, implementation="triton")
        dx = jax.vmap(run)(packed, np.ones_like(x))
        np.testing.assert_array_equal(dx, np.float32(levels)[(x > 0).astype(int) + (x > 1)])


def test_arrays_that_are_too_large():
    large, wide = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2**31,), (1, 65537)))
    with pytest.raises(ValueError, match="x: expected up to 2147481600 elements in Pallas"):
        jax.eval_shape(lambda x: activation_forward(x, "silu", (0.0,)), large)
    norm = {"center": True, "epsilon": 1e-6, "dtype": jnp.float32, "keep_normalized": True}
    with pytest.raises(ValueError, match="columns"):
        jax.eval_shape(lambda x: interface.norm_forward(x, None, None, **norm), wide)


def uses_pallas(op, *args):
    return "pallas_call" in str(jax.make_jaxpr(jax.grad(lambda *a: op(*a).sum()))(*args))


def test_default_is_xla_and_argument_context_and_environment_override_in_this_order(monkeypatch):
    x = jnp.ones((4, 256))
    assert not uses_pallas(lm.regelu2, x)
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "pallas_interpret")
    assert uses_pallas(lm.regelu2, x) and uses_pallas(lm.ms_rms_norm, x)
    with lm.set_implementation("xla"):
        assert not uses_pallas(lm.regelu2, x)
        assert uses_pallas(functools.partial(lm.regelu2, implementation="pallas_interpret"), x)
        with lm.set_implementation("pallas_interpret"):
            assert uses_pallas(lm.ms_layer_norm, x)
        assert not uses_pallas(lm.ms_layer_norm, x)


@pytest.mark.parametrize("op", [lm.ms_layer_norm, jax.vmap(lm.resilu2)])
def test_a_kernel_that_cannot_run_here_says_why(op):
    with (
        lm.set_implementation("pallas"),
        pytest.raises(ValueError, match=r"implementation: 'pallas' runs only on CUDA GPUs.*cpu"),
    ):
        jax.jit(jax.grad(lambda x: op(x).sum()))(jnp.ones((4, 256)))


def test_triton_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"implementation: 'triton' cannot run.*pip install"):
        lm.regelu2(jnp.ones(4), implementation="triton")


def test_errors_name_the_argument(monkeypatch):
    with pytest.raises(ValueError, match=r"implementation: expected .*'pallas'.*, got 'cuda'"):
        lm.set_implementation("cuda").__enter__()
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "cuda")
    with pytest.raises(ValueError, match=r"LOWMEMBP_IMPLEMENTATION: expected .*, got 'cuda'"):
        lm.ms_layer_norm(jnp.ones((2, 4)))


def test_no_kernel_for_other_axes_or_float64():
    pallas = {"implementation": "pallas_interpret"}
    with pytest.raises(ValueError, match=r"reduction axes \(0, 1\)"):
        norm = lm.MSLayerNorm(reduction_axes=(0, 1), feature_axes=(0, 1), **pallas)
        norm.init(jax.random.key(0), jnp.ones((2, 4)))
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x.* float32.*float64"):
        functools.partial(lm.regelu2, **pallas)(jnp.ones(4, jnp.float64))
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"dtype.* float32.*float64"):
        lm.ms_layer_norm(jnp.ones((4, 8), jnp.float32), dtype=jnp.float64, **pallas)


BF16, F32 = jnp.bfloat16, jnp.float32

# One GPU of each compute capability that Triton compiles for.
GPUS = {lm.memory.get_device(name).capability: name for name in lm.memory.DEVICES}
GPUS = [
    # The first of each generation of data centres; the rest are slow ones.
    pytest.param(name, marks=() if capability[1] == 0 and capability < (11,) else pytest.mark.slow)
    for capability, name in GPUS.items()
    if capability >= (8, 0)
]


def compile_for(device, fn, *shapes_dtypes):
    args = [jax.ShapeDtypeStruct(*each) for each in shapes_dtypes]
    return lm.memory.compile_for(fn, *args, device=device)


TABLES = (lm.REGELU2_TABLE, lm.STEP_TABLES["gelu_erf", 4])


def lowered_forward(function, x, table=lm.REGELU2_TABLE):
    y, packed = interface.activation_forward(x, function, table.thresholds)
    return y, jax.lax.bitcast_convert_type(packed, table.dtype).reshape(x.shape)


def lowered_backward(codes, g, table=lm.REGELU2_TABLE):
    each = 8 // jnp.iinfo(table.dtype).bits
    packed = jax.lax.bitcast_convert_type(codes.reshape(codes.size // each, each), jnp.uint8)
    return interface.activation_backward(packed, g, table.levels)


def lowered_norm(center, x, scale=None, bias=None):
    options = {"center": center, "epsilon": 1e-6, "dtype": x.dtype, "keep_normalized": True}
    return interface.norm_forward(x, scale, bias, **options)


def lowered_norm_backward(center, recover, kept, rstd, g, scale=None, bias=None):
    options = {"center": center, "x_dtype": kept.dtype, "recover": recover}
    return interface.norm_backward(kept, rstd, g, scale, bias, **options)


def assert_alone(device, name, fn, *shapes_dtypes):
    """The program has the kernel, and XLA adds neither fusions nor copies."""
    text = compile_for(device, fn, *shapes_dtypes).as_text()
    assert name in text and "fusion(" not in text and "copy(" not in text


@pytest.mark.compiled
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(
    ("shape", "table"), [((64, 1024), TABLES[0]), ((5, 12), TABLES[1])], ids=["2 bits", "4 bits"]
)
def test_activation_compiles_and_its_codes_are_small_integers_for_free(device, shape, table):
    for function in ("gelu_tanh", "gelu_erf", "silu"):
        for dtype in (BF16, F32):
            forward = functools.partial(lowered_forward, function, table=table)
            assert_alone(device, interface.ACTIVATION_FORWARD, forward, (shape, dtype))
    for dtype in (BF16, jnp.float16, F32):
        backward = functools.partial(lowered_backward, table=table)
        codes = (shape, table.dtype)
        assert_alone(device, interface.ACTIVATION_BACKWARD, backward, codes, (shape, dtype))


@pytest.mark.compiled
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", [(64, 1024), (5, 13)])
def test_gated_units_compile(device, shape):
    for function, dtype in (("gelu_tanh", BF16), ("gelu_erf", F32), ("silu", jnp.float16)):
        for run, arrays, name in (
            (interface.gated_forward, 2, interface.GATED_FORWARD),
            (interface.gated_backward, 3, interface.GATED_BACKWARD),
        ):
            run = functools.partial(run, function=function)
            assert_alone(device, name, run, *[(shape, dtype)] * arrays)


@pytest.mark.compiled
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", [(1024, 768), (7, 1023), (300, 16384)])
def test_norms_compile(device, shape):
    rows, width = shape
    for dtype, center in ((BF16, True), (F32, False)):
        x, row, parameter = (shape, dtype), ((rows,), F32), ((width,), F32)
        affine = [parameter, parameter] if center else [parameter]
        for arguments in ([x], [x, *affine]):
            forward = functools.partial(lowered_norm, center)
            text = compile_for(device, forward, *arguments).as_text()
            assert interface.NORM_FORWARD in text
        for arguments in ([x, row, x], [x, row, x, *affine]):
            backward = functools.partial(lowered_norm_backward, center, len(arguments) > 3)
            text = compile_for(device, backward, *arguments).as_text()
            assert interface.NORM_BACKWARD in text
            # Nothing but the sums over partial sums is left to XLA.
            assert len(arguments) > 3 or "fusion(" not in text


@pytest.mark.compiled
def test_kernels_address_large_arrays_in_64_bits(monkeypatch):
    """The kernels' Triton IR: every pointer into an array above 2^32 bytes moves by 64 bits."""
    from jax._src.pallas.triton import lowering

    modules = []
    lower = lowering.lower_jaxpr_to_triton_module

    def record(*args, **kwargs):
        result = lower(*args, **kwargs)
        modules.append(result.module.operation.get_asm())
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", record)
    x, row = ((2**19, 4097), BF16), ((2**19,), F32)
    compile_for("h200", functools.partial(lowered_norm, True), x)
    compile_for("h200", functools.partial(lowered_norm_backward, True, False), x, row, x)
    counts = [
        tuple(sum("tt.addptr" in line and kind in line for line in module.splitlines())
              for kind in ("bf16>, ", "xi64>", "xi32>"))
        for module in modules
    ]  # fmt: skip
    # bf16 x, out; y, g, dx in 64 bits; rstd in 32.
    assert [wide for _, wide, _ in counts] == [2, 3]
    assert [narrow for _, _, narrow in counts] == [1, 1]
