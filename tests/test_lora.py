"""LoRA, LoRA-FA and QLoRA: what is computed, what is trained, and what the backward keeps."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from lora_reference import dense_weights, randomized
from lowmembp_examples.lora import DENSES, add_lora, apply_lora, combine, partition
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.llama import CONFIGS, Llama

TINY = CONFIGS["llama-tiny"]
IDS = jax.random.randint(jax.random.key(9), (2, 16), 0, TINY.vocab_size)
RANK, ALPHA = 4, 12.0
SCALE = ALPHA / RANK


def make(train, scan_layers=False, method="default"):
    """A model, its parameters, and the two with LoRA."""
    plain = Llama(TINY, Compute(method), scan_layers=scan_layers)
    base = plain.init(jax.random.key(0), IDS)["params"]
    model = apply_lora(plain, train, RANK, ALPHA)
    return plain, base, model, add_lora(model, base, jax.random.key(1), IDS)


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
    at_first = unflatten_dict(dense_weights(params, SCALE)) if train.startswith("qlora") else base
    np.testing.assert_allclose(got, apply({"params": at_first}, IDS), atol=1e-5)
    params = randomized(params)
    got = jax.jit(model.apply)({"params": params}, IDS)
    want = apply({"params": unflatten_dict(dense_weights(params, SCALE))}, IDS)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want - apply({"params": at_first}, IDS)).max() > 1e-2


def test_nf4():
    """Weights in 4 bits with a scale for 64 inputs or fewer: near the ones they are of."""
    _, base, _, params = make("qlora-qv", scan_layers=True)
    quantized = {path for path, leaf in flatten_dict(params).items() if hasattr(leaf, "how")}
    assert {path[-2] for path in quantized} == set(DENSES) - {"intermediate", "output", "reduction"}
    weights = dense_weights(params, SCALE)
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
    for path, grad in jax.jit(jax.grad(dense_loss))(dense_weights(params, SCALE)).items():
        if path[-2] not in DENSES:
            continue
        a, b = ((*path[:-1], f"kernel_lora_{name}") for name in "ab")
        stacked_a, stacked_b = leaves[a], leaves[b]
        shape = (*stacked_a.shape[:2], stacked_b.shape[2])
        grad = grad.reshape(shape) * SCALE
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


def test_adding_lora_traces_the_model_twice():
    """And not once for each of its parameters, which takes minutes for a model of 12 layers."""
    calls = 0

    def count(call, args, kwargs, context):
        nonlocal calls
        calls += not context.module.path
        return call(*args, **kwargs)

    with nn.intercept_methods(count):
        make("lora-qv")
    plain_and_shapes_and_values = 3
    assert calls == plain_and_shapes_and_values
