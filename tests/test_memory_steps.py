"""Steps as users have them: with callbacks, constants, and products that XLA has no tiles for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import lowmembp_jax as lm
from lowmembp_jax import _jax_internals as jax_internals

F32 = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


def with_callbacks(params, x, *, ordered=False):
    jax.debug.print("loss {}", x.sum(), ordered=ordered)
    jax.debug.callback(lambda x: None, x, ordered=ordered)
    io_callback(lambda x: None, None, x, ordered=ordered)

    def layer(h, _):
        jax.debug.print("h {}", h.sum(), ordered=ordered)
        return h * params, None

    h, _ = jax.lax.scan(layer, x, None, length=3)
    return h + jax.pure_callback(np.sin, F32, x)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_are_left_out(ordered):
    for _ in range(2):  # what JAX has lowered before is told again
        plan = lm.memory.plan(partial(with_callbacks, ordered=ordered), F32, F32)
        (note,) = plan.notes
        for name in ("debug_print", "debug_callback", "io_callback", "pure_callback"):
            assert name in note
    assert (plan.parameters, plan.batch) == (0, 2 * SIZE) or plan.parameters == SIZE
    assert plan.peak >= 3 * SIZE
    assert note in str(plan)
    assert lm.memory.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.gpu_compiler
def test_a_callback_in_the_backward():
    def step(params, x):
        def loss(params):
            h = jnp.tanh(x @ params)
            jax.debug.print("h {}", h.mean())
            return h.sum()

        return jax.value_and_grad(jax.checkpoint(loss))(params)

    assert "debug_print" in lm.memory.plan(step, F32, F32).notes[0]
    plain = lm.memory.plan(
        lambda params, x: jax.grad(lambda p: jnp.tanh(x @ p).sum())(params), F32, F32
    )
    assert plain.notes == ()


def test_other_lowerings_keep_their_callbacks(capfd):
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x

    traced = jax.jit(f).trace(1.0)
    _, names = jax_internals.lower_without_callbacks(traced)
    assert names == ["debug_callback"]
    jax.block_until_ready(jax.jit(f)(2.0))
    jax.effects_barrier()
    assert seen == [2.0]


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """As Equinox's modules are: a pytree whose leaves are no arrays alone."""

    def __init__(self, weight, activation, power):
        self.weight, self.activation, self.power = weight, activation, power

    def tree_flatten_with_keys(self):
        names = ("weight", "activation", "power")
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.gpu_compiler
def test_what_is_no_array_is_a_constant():
    def step(model, x, mode, frozen=None):
        assert mode == "train" and model.power == 3

        def loss(weight):
            return (model.activation(x @ weight) ** model.power).sum()

        weight = model.weight - jax.grad(loss)(model.weight)
        return Layer(weight, model.activation, model.power), model.activation

    model = Layer(F32, jax.nn.relu, 3)
    plan = lm.memory.plan(step, model, F32, "train", None, donate=0)
    assert (plan.parameters, plan.batch) == (SIZE, SIZE)
    assert plan.outputs < 1000  # the weight goes where it was
    assert any(buffer.op == "model.weight" for buffer in plan.live)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "layers"}])
def test_static_arguments_of_a_jitted_step(static):
    def step(layers, params, x):
        for _ in range(layers):
            x = x @ params
        return params + x

    jitted = jax.jit(step, donate_argnums=1, **static)
    plan = lm.memory.plan(jitted, 3, F32, F32)
    assert (plan.parameters, plan.batch) == (SIZE, SIZE)
    assert plan.outputs < 1000
    assert plan.cost.flops == 3 * 2 * 256**3


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        (
            lambda params, *, x: x,
            (F32,),
            r"1 arguments: missing a required .*'x'.*functools.partial",
        ),
        (lambda params: params, (F32, F32), r"\(params\) cannot be called with 2 arguments"),
        (
            lambda x: jax.jit(jnp.sin, compiler_options={"xla_dump_to": ""})(x),
            (F32,),
            "jax.jit with compiler_options, .* give that function itself",
        ),
        (jax.jit(jnp.sin).lower(1.0), (F32,), "step: .* got a Lowered"),
        (jax.jit(jnp.sin).lower(1.0).compile(), (F32,), "step: .* got a Compiled"),
    ],
)
def test_calls_that_do_not_work(step, args, message):
    with pytest.raises(lm.memory.StepError, match=message) as error:
        lm.memory.plan(step, *args)
    assert "\n" not in str(error.value)


@pytest.mark.gpu_compiler
def test_no_tiles(monkeypatch):
    """A product for which XLA finds no tiles without a GPU; which they are varies with JAX."""
    tried = []
    compile = jax.stages.Lowered.compile

    def no_tiles(self, options):
        tried.append(dict(options))
        if options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes for x")
        return compile(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", no_tiles)
    plan = lm.memory.plan(jnp.matmul, F32, F32)
    assert plan.notes == (
        "compiled with xla_gpu_enable_triton_gemm=False: XLA found no tiles for a product",
    )
    assert [options.get("xla_gpu_enable_triton_gemm") for options in tried] == [None, False]
    lm.memory.compile_for(jnp.matmul, F32, F32)
    assert len(tried) == 4
    # Who asks for Triton's gets the error.
    with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
        lm.memory.plan(jnp.matmul, F32, F32, compiler_options={"xla_gpu_enable_triton_gemm": True})


@pytest.mark.gpu_compiler
def test_no_bfloat16():
    bf16 = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    step = partial(jax.lax.dot, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    with pytest.raises(
        lm.memory.StepError, match="device='t4' has no matrix product in ALG_DOT_BF"
    ):
        lm.memory.plan(step, bf16, bf16, device="t4")


@pytest.mark.gpu_compiler
def test_no_platform_to_trace_with(monkeypatch):
    def devices():
        raise AssertionError  # as JAX does without a word

    monkeypatch.setattr(jax, "devices", devices)
    message = "JAX_PLATFORMS='cpu': this machine has no such device"
    with pytest.raises(lm.memory.StepError, match=message):
        lm.memory.plan(jnp.matmul, F32, F32)
