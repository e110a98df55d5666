"""LoRA and QLoRA in the models of all families: outputs, gradients, and what is trained."""

import dataclasses
import functools
import importlib
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import quick_jit
from lowmembp_examples.lora import DENSES, add_lora, apply_lora, combine, partition
from tiny_models import TINY, inputs

import lowmembp_jax as lm
from lowmembp_jax.models.families import FAMILIES
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import Llama

RANK, ALPHA = 4, 12.0
SCALE = ALPHA / RANK
(IDS,) = inputs("llama")


@functools.cache
def base(family="llama", method="lowmembp", **fields):
    """A model, its parameters, and its jitted `apply`."""
    model = FAMILIES[family].model(TINY[family], Compute(method), **fields)
    abstract = jax.eval_shape(model.init, jax.random.key(0), *inputs(family))["params"]
    draw = np.random.default_rng(1)
    params = {
        path: jnp.asarray(draw.normal(path[-1] == "scale", 0.1, leaf.shape), leaf.dtype)
        for path, leaf in flatten_dict(abstract).items()
    }
    return model, unflatten_dict(params), quick_jit(model.apply)


def with_lora(train, family="llama", **fields):
    """The model with LoRA and its parameters, whose B are 0."""
    plain, params, _ = base(family, **fields)
    model = apply_lora(plain, train, RANK, ALPHA)
    return model, add_lora(model, params, jax.random.key(1), *inputs(family))


def randomized(params):
    """The parameters, with B and every other array of zeros drawn at random."""
    draw = np.random.default_rng(0)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.any():
            return x
        return jnp.asarray(draw.normal(0, 0.05, x.shape), x.dtype)

    return jax.tree.map(leaf, params)


def dense_weights(params):
    """Parameters by path for the model without LoRA: dequantized, and A B added to the kernels."""
    leaves, weights = flatten_dict(params), {}
    for path, leaf in leaves.items():
        if "_lora_" in path[-1]:
            continue
        weight = qwix.dequantize(leaf.array) if hasattr(leaf, "how") else leaf
        a, b = (leaves.get((*path[:-1], f"kernel_lora_{name}")) for name in "ab")
        if a is not None and path[-1] == "kernel":
            weight = weight + (jnp.matmul(a, b) * SCALE).reshape(weight.shape)
        weights[path] = weight
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "train", "fields"),
    [
        *((family, train, {}) for train in ("lora-all", "qlora-all") for family in TINY),
        ("llama", "lora-fa-all", {"scan_layers": True, "method": "dots"}),
        ("llama", "qlora-qv", {"method": "lowmembp+remat"}),
        ("llama", "qlora-all", {"scan_layers": True}),
    ],
    ids=str,
)
def test_output(family, train, fields):
    """At first the base model's, whose weights QLoRA rounds; then W + alpha / rank A B's."""
    _, params, apply_plain = base(family, **fields)
    args = inputs(family)
    model, lora = with_lora(train, family, **fields)
    abstract = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
    assert jax.tree.structure(lora) == jax.tree.structure(abstract)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, lora, abstract))
    apply = quick_jit(model.apply)
    got = apply({"params": lora}, *args)
    want = apply_plain({"params": params}, *args)
    if not train.startswith("qlora"):
        # B is 0; the two programs round differently.
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    else:
        # NF4's error in each weight is 9% of it, see test_nf4.
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 0 < error < 0.5
    lora = randomized(lora)
    got = apply({"params": lora}, *args)
    want = apply_plain({"params": unflatten_dict(jax.jit(dense_weights)(lora))}, *args)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.slow
def test_nf4():
    """Weights in 4 bits, with one scale for up to 64 inputs, are near the original weights."""
    _, params, _ = base(scan_layers=True)
    params, lora = flatten_dict(params), with_lora("qlora-qv", scan_layers=True)[1]
    quantized = {path: leaf for path, leaf in flatten_dict(lora).items() if hasattr(leaf, "how")}
    assert {path[-2] for path in quantized} == set(DENSES) - {"intermediate", "output", "reduction"}
    weights = dense_weights(lora)
    for path, leaf in quantized.items():
        want = params[path]
        assert leaf.array.qvalue.dtype == jnp.uint4
        assert leaf.array.scale.size * 64 == want.size or path[-2] == "attention_output"
        # A Gaussian's NF4 error in blocks of 64 is 9% of it (QLoRA, appendix E), of 16 less.
        error = jnp.sqrt(jnp.mean((weights[path] - want) ** 2) / jnp.mean(want**2))
        assert 0.05 < error < 0.1, path


@pytest.mark.slow
def test_arrays_of_numpy():
    """Checkpoints contain them. qwix does not recognize them as a module's weights."""
    model, params = with_lora("lora-qv")
    params = randomized(params)
    want = model.apply({"params": params}, IDS)
    given = jax.tree.map(np.asarray, params)
    got = model.apply({"params": combine(*partition(given, "lora-qv"), jnp.float32)}, IDS)
    np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected jax\.Arrays; .* jax\.tree\.map"):
        model.apply({"params": given}, IDS)


@pytest.mark.slow
def test_gradients():
    """The gradients of A and B follow from the gradient of the weight."""
    plain, _, _ = base(scan_layers=True)
    model, params = with_lora("qlora-all", scan_layers=True)
    params = randomized(params)
    trained, frozen = partition(params, "qlora-all")

    def loss(trained):
        return model.apply({"params": combine(trained, frozen, jnp.float32)}, IDS, IDS).sum()

    def dense_loss(weights):
        return plain.apply({"params": unflatten_dict(weights)}, IDS, IDS).sum()

    grads = flatten_dict(quick_jit(jax.grad(loss))(trained))
    leaves = flatten_dict(params)
    for path, grad in quick_jit(jax.grad(dense_loss))(dense_weights(params)).items():
        if path[-2] not in DENSES:
            continue
        a, b = ((*path[:-1], f"kernel_lora_{name}") for name in "ab")
        stacked_a, stacked_b = leaves[a], leaves[b]
        grad = grad.reshape(*stacked_a.shape[:2], stacked_b.shape[2]) * SCALE
        for name, want in {a: grad @ stacked_b.mT, b: stacked_a.mT @ grad}.items():
            scale = np.abs(want).max()
            np.testing.assert_allclose(grads[name], want, atol=1e-4 * scale, err_msg=str(name))


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_what_gets_a_gradient(family):
    """A and B of every Dense and the modules of the head, and nothing else."""
    args = inputs(family)
    model, params = with_lora("lora-all", family)
    params = randomized(params)
    trained, frozen = partition(params, "lora-all")

    def loss(trained):
        logits = model.apply({"params": combine(trained, frozen, jnp.float32)}, *args)
        return jax.nn.log_softmax(logits)[..., 0].mean()

    grads = flatten_dict(quick_jit(jax.grad(loss))(trained))
    names = {path[-2] for path in flatten_dict(params) if path[-1] == "kernel"}
    heads = names & {"classifier", "dense"}  # RoBERTa's is two Denses
    assert {path[-2] for path in grads} == (names & set(DENSES)) | heads
    for path, grad in grads.items():
        assert path[-2] in heads or path[-1] in ("kernel_lora_a", "kernel_lora_b")
        assert np.isfinite(grad).all() and grad.any(), path


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_fewer_trained_parameters_save_fewer_residuals(family):
    """No input of a frozen Dense is saved, and no input of a frozen A."""
    plain, _, _ = base(family)
    args = inputs(family)

    def saved(train):
        model = apply_lora(plain, train, rank=1)
        abstract = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
        trained, frozen = partition(abstract, train)

        def loss(trained, frozen):
            return model.apply({"params": combine(trained, frozen, jnp.float32)}, *args).sum()

        return lm.memory.saved_bytes(loss, trained, frozen, argnums=0)

    everything, every_dense, q_and_v, no_a = map(
        saved, ["full", "lora-all", "lora-qv", "lora-fa-qv"]
    )
    assert everything > every_dense > q_and_v > no_a


@pytest.mark.parametrize(
    ("train", "trained"),
    [
        ("full", {"kernel", "kernel_lora_a", "kernel_lora_b"}),
        ("qlora-all", {"kernel_lora_a", "kernel_lora_b"}),
        ("lora-fa-qv", {"kernel_lora_b"}),
    ],
)
def test_what_is_trained(train, trained):
    """In float32, and cast for the model; a classifier is trained in float32."""
    query = {name: jnp.ones(2) for name in ("kernel", "kernel_lora_a", "kernel_lora_b")}
    head = {"kernel": jnp.ones(2)}
    parts = partition({"query": query, "classifier": head}, train)
    assert set(parts[0]["query"]) == trained and parts[0]["classifier"] == head
    assert parts[0]["query"] | parts[1].get("query", {}) == query
    assert "classifier" not in parts[1] and bool(parts[1]) == (train != "full")
    combined = combine(*parts, jnp.bfloat16)
    assert combined["query"]["kernel_lora_b"].dtype == jnp.bfloat16
    assert combined["classifier"]["kernel"].dtype == jnp.float32


def test_errors():
    plain, params, _ = base()
    mixed = Llama(TINY["llama"], dataclasses.replace(plain.compute, dtype=jnp.bfloat16))
    for model, train, rank, message in (
        (plain, "lora", 8, r"train: expected one of full, .* got 'lora'"),
        (plain, "lora-qv", 0, "rank: expected 1 or more, got 0"),
        (mixed, "lora-qv", 8, "param_dtype=float32 and dtype=bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_lora(model, train, rank)
    headless = {name: params[name] for name in params if name != "lm_head"}
    with pytest.raises(ValueError, match="lm_head/kernel"):
        add_lora(apply_lora(plain, "lora-qv"), headless, jax.random.key(0), IDS)


def test_adding_lora_traces_the_model_twice():
    """One trace for each parameter would take minutes for a model of 12 layers."""
    calls = 0

    def count(call, args, kwargs, context):
        nonlocal calls
        calls += not context.module.path
        return call(*args, **kwargs)

    base("llama")  # cached, so only the traces of `add_lora` count
    with nn.intercept_methods(count):
        with_lora("lora-qv")
    assert calls == 2


def test_full_training_needs_no_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    for name in ("lora", "lora_provider"):
        monkeypatch.delitem(sys.modules, f"lowmembp_examples.{name}", raising=False)
    lora = importlib.import_module("lowmembp_examples.lora")
    model = nn.Dense(2)
    assert lora.apply_lora(model, "full") is model
    with pytest.raises(ModuleNotFoundError, match="qwix"):
        lora.apply_lora(types.SimpleNamespace(compute=Compute()), "lora-qv")
