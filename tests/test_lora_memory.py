"""What a step with LoRA, LoRA-FA and QLoRA saves, and its memory when compiled for a GPU."""

import dataclasses
import resource
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.lora import apply_lora, combine, partition

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import CONFIGS, Llama, LlamaConfig

pytestmark = pytest.mark.slow

RANK = 4


class Linear(nn.Module):
    """Denses and nothing else: they save all residuals."""

    compute: Compute = Compute()

    @nn.compact
    def __call__(self, x):
        y = 2.0 * x  # an array of its own, as a norm's output would be
        heads = [nn.DenseGeneral((4, 16), name=name)(y) for name in ("query", "key", "value")]
        h = nn.DenseGeneral(64, axis=(-2, -1), name="attention_output")(sum(heads, heads[0]))
        return nn.Dense(64, name="down")(nn.Dense(192, name="up")(h))


def linear(train, tokens=256):
    """The trained parameters and the input of `Linear` with LoRA, and a function of both."""
    model, x = apply_lora(Linear(), train, RANK), jnp.ones((1, tokens, 64))
    trained, frozen = partition(model.init(jax.random.key(0), x)["params"], train)

    def fn(trained, x):
        return model.apply({"params": combine(trained, frozen, jnp.float32)}, x)

    return fn, trained, x


@pytest.mark.parametrize(
    ("train", "inputs", "products"),
    [
        ("full", 5 + 1, 0),  # y once, and the inputs of attention_output, up, down: 64, 64, 192
        ("lora-qv", 1, 2),
        ("lora-all", 5 + 1, 6),
        ("lora-fa-qv", 0, 2),
        ("lora-fa-all", 0, 6),
        ("qlora-qv", 1, 2),
        ("qlora-all", 5 + 1, 6),
    ],
)
def test_saved(train, inputs, products):
    """In arrays of 64 features: the input of q and v once, and `RANK` numbers of every A x. Frozen
    Denses save nothing, and A's input is not saved if A is frozen."""
    tokens = 256
    fn, trained, x = linear(train, tokens)
    saved = lm.memory.saved_bytes(fn, trained, x)
    # The cast in `combine` to the dtype that A and B have copies nothing. Reshapes of weights do.
    reshaped = saved - tokens * 4 * (64 * inputs + RANK * products)
    weights = sum(x.size * 4 for x in jax.tree.leaves(trained)) if train != "full" else 0
    assert 0 <= reshaped <= weights < tokens * 4 * 64


@pytest.mark.parametrize("train", ["lora-all", "qlora-all"])
def test_compress_computes_no_product_again(train):
    fn, trained, x = linear(train)

    def products(method):
        gradient = jax.grad(lambda trained, x: jnp.sum(jnp.square(method(fn)(trained, x))))
        return str(jax.make_jaxpr(gradient)(trained, x)).count("dot_general[")

    assert products(lm.compress) == products(lambda block: block) < products(jax.checkpoint)


def compiled_sizes(train, config, scan_layers, method="lowmembp", batch=1, tokens=16):
    """Arguments and temporaries of a step, in bytes."""
    compute = Compute(method, jnp.bfloat16, jnp.bfloat16, "cudnn", merged=True)
    model = apply_lora(Llama(config, compute, scan_layers=scan_layers), train)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    trained, frozen = partition(params, train)

    def loss(trained, frozen, ids):
        params = combine(trained, frozen, compute.dtype)
        return model.apply({"params": params}, ids, ids).mean()

    compiled = lm.memory.compile_for(jax.value_and_grad(loss), trained, frozen, ids)
    sizes = compiled.memory_analysis()
    return np.array([sizes.argument_size_in_bytes, sizes.temp_size_in_bytes])


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("scan_layers", "method"), [(False, "lowmembp"), (True, "lowmembp+remat")])
def test_quantized_weights_stay_quantized(scan_layers, method):
    """Another layer takes 4 bits a weight of arguments, and saves no weight in 16 bits."""
    config = LlamaConfig(256, 2, 4, 704, vocab_size=64)
    fewer, more = (
        compiled_sizes(
            "qlora-qv", dataclasses.replace(config, num_hidden_layers=layers), scan_layers, method
        )
        for layers in (2, 4)
    )
    arguments, temporaries = (more - fewer) / 2
    weights = 4 * 256**2 + 3 * 256 * 704
    lora = 2 * 2 * 8 * 256 * 2
    assert arguments == pytest.approx(weights / 2 + weights / 64 * 2 + lora, rel=0.01)
    assert temporaries < weights * 2 / 4


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("name", "train"), [("llama-7b", "lora-qv"), ("llama-13b", "qlora-qv")])
def test_large_models_are_compiled_here(name, train):
    """Without the memory of their parameters, and in less than 3 minutes."""
    start = time.monotonic()
    config = CONFIGS[name]
    arguments, temporaries = compiled_sizes(train, config, True, batch=4, tokens=2048)
    assert time.monotonic() - start < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8e6  # kB
    layers, hidden = config.num_hidden_layers, config.hidden_size
    weights = layers * hidden * (4 * hidden + 3 * config.intermediate_size)
    tables = 2 * config.vocab_size * hidden * 2
    per_weight = 2 if train == "lora-qv" else 1 / 2 + 2 / 64
    assert arguments == pytest.approx(weights * per_weight + tables, rel=0.01)
    # Norm outputs 2, q, k, v 3, attention's output 1; gate and up. See test_decoders.py.
    units = layers * (6 + 2 * config.intermediate_size / hidden)
    assert temporaries == pytest.approx(units * 4 * 2048 * hidden * 2, rel=0.08)
