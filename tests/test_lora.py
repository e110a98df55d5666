"""LoRA, LoRA-FA and QLoRA: what is computed, what is trained, and what the backward keeps."""

import dataclasses
import resource
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax.traverse_util import flatten_dict, unflatten_dict
from lora import DENSES, add_lora, apply_lora, combine, partition
from models.common import Compute
from models.llama import CONFIGS, Llama, LlamaConfig

import lowmembp_jax as lm

# qwix 0.1.8 asks for it under flax 0.12's new name too late.
pytestmark = pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")

TINY = CONFIGS["llama-tiny"]
IDS = jax.random.randint(jax.random.key(9), (2, 16), 0, TINY.vocab_size)
RANK, ALPHA = 4, 12.0


def make(train, scan_layers=False, method="default"):
    """A model, its parameters, and the two with LoRA."""
    plain = Llama(TINY, Compute(method), scan_layers=scan_layers)
    base = plain.init(jax.random.key(0), IDS)["params"]
    model = apply_lora(plain, train, RANK, ALPHA)
    return plain, base, model, add_lora(model, base, jax.random.key(1), IDS)


def dense_weights(params):
    """By path, in floating point: what the Denses multiply with, LoRA included."""
    leaves, weights = flatten_dict(params), {}
    for path, leaf in leaves.items():
        if "_lora_" in path[-1]:
            continue
        weight = qwix.dequantize(leaf.array) if hasattr(leaf, "how") else leaf
        a, b = (leaves.get((*path[:-1], f"kernel_lora_{name}")) for name in "ab")
        if a is not None:
            product = jnp.matmul(a, b) * (ALPHA / RANK)
            weight = weight + product.reshape(weight.shape)
        weights[path] = weight
    return weights


def randomized(params):
    """With B no longer zero."""
    return jax.tree.map(
        lambda x: x + 0.05 if jnp.issubdtype(x.dtype, jnp.floating) and not x.any() else x, params
    )


@pytest.mark.parametrize(
    ("train", "scan_layers", "method"),
    [
        ("lora-fa-all", True, "dots"),
        ("qlora-qv", False, "lowmembp+remat"),
        ("qlora-all", True, "lowmembp"),
    ],
)
def test_output(train, scan_layers, method):
    """That of the base model at first; then that of W + alpha / rank A B."""
    plain, base, model, params = make(train, scan_layers, method)
    abstract = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert [x.shape for x in jax.tree.leaves(params)] == [
        x.shape for x in jax.tree.leaves(abstract)
    ]
    apply = jax.jit(plain.apply)
    got = jax.jit(model.apply)({"params": params}, IDS)
    at_first = unflatten_dict(dense_weights(params)) if train.startswith("qlora") else base
    np.testing.assert_allclose(got, apply({"params": at_first}, IDS), atol=1e-5)
    params = randomized(params)
    got = jax.jit(model.apply)({"params": params}, IDS)
    want = apply({"params": unflatten_dict(dense_weights(params))}, IDS)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want - apply({"params": at_first}, IDS)).max() > 1e-2


def test_nf4():
    """Weights in 4 bits with a scale for 64 inputs or fewer: near the ones they are of."""
    _, base, _, params = make("qlora-qv", scan_layers=True)
    quantized = {path for path, leaf in flatten_dict(params).items() if hasattr(leaf, "how")}
    assert {path[-2] for path in quantized} == set(DENSES) - {"intermediate", "output", "reduction"}
    weights = dense_weights(params)
    for path in quantized:
        leaf, want = flatten_dict(params)[path].array, flatten_dict(base)[path]
        assert leaf.qvalue.dtype == jnp.uint4
        assert leaf.scale.size * 64 == want.size or path[-2] == "attention_output"
        # A Gaussian's NF4 error in blocks of 64 is 9% of it (QLoRA, appendix E), of 16 less.
        error = jnp.sqrt(jnp.mean((weights[path] - want) ** 2) / jnp.mean(want**2))
        assert 0.05 < error < 0.1, path


def test_gradients():
    """Those of A and B that follow from the gradient of the weight."""
    plain, _, model, params = make("qlora-all", scan_layers=True)
    params = randomized(params)
    trained, frozen = partition(params, "qlora-all")

    def loss(trained):
        return model.apply({"params": combine(trained, frozen, jnp.float32)}, IDS, IDS).sum()

    def dense_loss(weights):
        return plain.apply({"params": unflatten_dict(weights)}, IDS, IDS).sum()

    grads = flatten_dict(jax.jit(jax.grad(loss))(trained))
    leaves = flatten_dict(params)
    for path, grad in jax.jit(jax.grad(dense_loss))(dense_weights(params)).items():
        if path[-2] not in DENSES:
            continue
        a, b = ((*path[:-1], f"kernel_lora_{name}") for name in "ab")
        stacked_a, stacked_b = leaves[a], leaves[b]
        shape = (*stacked_a.shape[:2], stacked_b.shape[2])
        grad = grad.reshape(shape) * (ALPHA / RANK)
        want = {a: grad @ stacked_b.mT, b: stacked_a.mT @ grad}
        for name, value in want.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(grads[name], value, atol=1e-4 * scale, err_msg=str(name))


@pytest.mark.parametrize(
    ("train", "denses", "leaves"),
    [
        ("lora-qv", {"query", "value"}, "ab"),
        ("lora-fa-qv", {"query", "value"}, "b"),
        ("lora-fa-all", set(DENSES), "b"),
        ("qlora-all", set(DENSES), "ab"),
    ],
)
def test_what_is_trained(train, denses, leaves):
    """A and B only, in the optimizer too."""
    model = apply_lora(Llama(TINY, scan_layers=True), train)
    abstract = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract)
    trained, frozen = partition(params, train)
    assert set(flatten_dict(trained)) == {
        ("layers", dense, f"kernel_lora_{leaf}")
        for dense in denses - {"intermediate", "output", "reduction"}
        for leaf in leaves
    }
    state = optax.adamw(1e-3).init(trained)
    assert sum(x.size for x in jax.tree.leaves(state)) == 1 + 2 * sum(
        x.size for x in jax.tree.leaves(trained)
    )
    again = combine(trained, frozen, jnp.float32)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(params)))


def test_the_classifier_is_trained_and_masters_are_cast():
    params = {
        "layer_0": {"query": {"kernel": 1.0, "kernel_lora_a": jnp.ones(2)}},
        "classifier": {"kernel": jnp.ones(2)},
    }
    trained, frozen = partition(params, "lora-qv")
    assert frozen == {"layer_0": {"query": {"kernel": 1.0}}}
    again = combine(trained, frozen, jnp.bfloat16)
    assert again["layer_0"]["query"]["kernel_lora_a"].dtype == jnp.bfloat16
    assert again["classifier"]["kernel"].dtype == jnp.float32
    assert partition(params, "full") == (params, {})


class Linear(nn.Module):
    """Denses and nothing else: what is kept, they keep."""

    compute: Compute = Compute()

    @nn.compact
    def __call__(self, x):
        y = 2.0 * x  # an array of its own, which the norm's output would be
        heads = [nn.DenseGeneral((4, 16), name=name)(y) for name in ("query", "key", "value")]
        h = nn.DenseGeneral(64, axis=(-2, -1), name="attention_output")(sum(heads, heads[0]))
        return nn.Dense(64, name="down")(nn.Dense(192, name="up")(h))


@pytest.mark.parametrize(
    ("train", "inputs", "products"),
    [
        ("full", 5 + 1, 0),  # y once, and what attention_output, up and down take: 64, 64, 192
        ("lora-qv", 1, 2),
        ("lora-all", 5 + 1, 6),
        ("lora-fa-qv", 0, 2),
        ("lora-fa-all", 0, 6),
        ("qlora-qv", 1, 2),
        ("qlora-all", 5 + 1, 6),
    ],
)
def test_kept(train, inputs, products):
    """In arrays of 64 features: the input of q and v once, and rank numbers of every A x; nothing
    of frozen Denses, nor of A's input where A is frozen."""
    tokens = 256
    x = jax.random.normal(jax.random.key(2), (1, tokens, 64))
    plain = Linear()
    base = plain.init(jax.random.key(0), x)["params"]
    model = apply_lora(plain, train, RANK)
    params = base if train == "full" else add_lora(model, base, jax.random.key(1), x)
    trained, frozen = partition(params, train)

    def fn(trained, x):
        return model.apply({"params": combine(trained, frozen, jnp.float32)}, x)

    kept = lm.memory.saved_bytes(fn, trained, x)
    # The cast in `combine` to the dtype that A and B have is none. Reshapes of weights count.
    reshaped = kept - tokens * 4 * (64 * inputs + RANK * products)
    weights = sum(x.size * 4 for x in jax.tree.leaves(trained)) if train != "full" else 0
    assert 0 <= reshaped <= weights < tokens * 4 * 64


def compiled_sizes(train: Any, config, scan_layers, method="lowmembp", batch=1, tokens=16):
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
def test_quantized_weights_stay_so(scan_layers, method):
    """A layer more takes 4 bits a weight of arguments, and no weight in 16 bits is kept."""
    few_tokens = LlamaConfig(256, 2, 4, 704, vocab_size=64)
    fewer, more = (
        compiled_sizes(
            "qlora-qv",
            dataclasses.replace(few_tokens, num_hidden_layers=layers),
            scan_layers,
            method,
        )
        for layers in (2, 4)
    )
    arguments, kept = (more - fewer) / 2
    weights = 4 * 256**2 + 3 * 256 * 704
    lora = 2 * 2 * 8 * 256 * 2
    assert arguments == pytest.approx(weights / 2 + weights / 64 * 2 + lora, rel=0.01)
    assert kept < weights * 2 / 4


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("name", "train"), [("llama-7b", "lora-qv"), ("llama-13b", "qlora-qv")])
def test_large_models_are_compiled_here(name, train):
    """Without the memory of their parameters, and in less than 3 minutes."""
    start = time.monotonic()
    config = CONFIGS[name]
    arguments, temporaries = compiled_sizes(train, config, True, batch=4, tokens=2048)
    assert time.monotonic() - start < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8e6  # kB
    weights = (
        config.num_hidden_layers
        * config.hidden_size
        * (4 * config.hidden_size + 3 * config.intermediate_size)
    )
    tables = 2 * config.vocab_size * config.hidden_size * 2
    per_weight = 2 if train == "lora-qv" else 1 / 2 + 2 / 64
    assert arguments == pytest.approx(weights * per_weight + tables, rel=0.01)
    # Norm outputs 2, q, k, v 3, attention's output 1; silu and up; codes. See test_llama.py.
    ratio = config.intermediate_size / config.hidden_size
    units = config.num_hidden_layers * (6 + 2 * ratio + ratio / 8)
    assert temporaries == pytest.approx(units * 4 * 2048 * config.hidden_size * 2, rel=0.08)


def test_errors():
    plain, base, model, _ = make("lora-qv")
    with pytest.raises(ValueError, match="train='lora', accepted are full, lora-qv"):
        apply_lora(plain, "lora")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rank=0, accepted is 1 or more"):
        apply_lora(plain, "lora-qv", rank=0)
    mixed = dataclasses.replace(plain.compute, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="param_dtype=float32 and dtype=bfloat16"):
        apply_lora(Llama(TINY, mixed), "lora-qv")
    with pytest.raises(ValueError, match="lm_head/kernel"):
        add_lora(model, {k: v for k, v in base.items() if k != "lm_head"}, jax.random.key(0), IDS)
