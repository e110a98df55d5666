"""LLaMA against PyTorch: logits, loss and gradients, scanned or not, merged or not."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors
from lowmembp_examples.models import language_head, llama
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.llama import Llama, LlamaConfig

import lowmembp_jax as lm

DATA = Path(__file__).parent / "data/hf_tiny"
CASES = ("llama", "llama_gqa")
METHODS = ("default", "norm+activation", "dots", "full-remat", "lowmembp", "lowmembp+remat")


def abstract_params(model):
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), ids)["params"]


def load(case, scan_layers=False, **compute):
    """The model and its parameters, what goes in and what PyTorch computes from it."""
    config = LlamaConfig.from_json(DATA / case / "config.json")
    model = Llama(config, Compute(**compute), scan_layers=scan_layers)
    plain = Llama(config, scan_layers=scan_layers)
    tensors = read_tensors(DATA / case)
    params = to_params(tensors, abstract_params(plain), llama.hugging_face_name, llama.UNUSED)
    if model.compute.merged:
        params = lm.merge_norm_affine(params, llama.norm_rules(config))
    return model, params, dict(np.load(DATA / case / "io.npz"))


def loss_function(model, ids, chunked=False):
    ids = jnp.asarray(ids, jnp.int32)

    def loss(params):
        if chunked:
            targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
            losses = model.apply({"params": params}, ids, targets)
            return losses.sum() / ids[:, 1:].size
        logits = model.apply({"params": params}, ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    return loss


def relative(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_gradients_are_pytorchs(case, scan_layers):
    model, params, io = load(case, scan_layers)
    loss, grads = jax.jit(jax.value_and_grad(loss_function(model, io["in.input_ids"])))(params)
    np.testing.assert_allclose(loss, io["loss"], rtol=1e-6)
    tensors = from_params(grads, llama.hugging_face_name)
    assert {f"grad.{name}" for name in tensors} == {n for n in io if n.startswith("grad.")}
    for name, grad in tensors.items():
        assert relative(grad, io[f"grad.{name}"]) < 1e-4, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["default", "lowmembp"])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_pytorchs(case, method, merged, scan_layers):
    model, params, io = load(case, scan_layers, method=method, merged=merged)
    assert jax.tree.structure(params) == jax.tree.structure(abstract_params(model))
    logits = jax.jit(model.apply)({"params": params}, jnp.asarray(io["in.input_ids"], jnp.int32))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, io["logits"], atol=2e-5)


def test_chunked_attention_and_loss(monkeypatch):
    monkeypatch.setattr(language_head, "LOSS_CHUNK", 8)
    model, params, io = load("llama_gqa", attention="chunked")
    fn = loss_function(model, io["in.input_ids"], chunked=True)
    loss, grads = jax.jit(jax.value_and_grad(fn))(params)
    np.testing.assert_allclose(loss, io["loss"], rtol=1e-6)
    for name, grad in from_params(grads, llama.hugging_face_name).items():
        assert relative(grad, io[f"grad.{name}"]) < 1e-4, name


def test_methods_of_plain_ops_give_the_same_gradients():
    def grads(method):
        model, params, io = load("llama", method=method)
        return jax.jit(jax.grad(loss_function(model, io["in.input_ids"])))(params)

    want = grads("default")
    for method in METHODS[1:4]:
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(grads(method)), strict=True):
            assert relative(g, w) < 1e-5, method


def test_lowmembp_gradients():
    """Approximate by ReSiLU2 alone: the same with and without remat, merging and scan."""

    def grads(method, **kwargs):
        model, params, io = load("llama", method=method, **kwargs)
        grads = jax.jit(jax.grad(loss_function(model, io["in.input_ids"])))(params)
        return from_params(grads, llama.hugging_face_name)

    plain, ours = grads("default"), grads("lowmembp")
    for name in plain:
        g, w = ours[name].ravel(), plain[name].ravel()
        assert np.dot(g, w) > 0.8 * np.linalg.norm(g) * np.linalg.norm(w), name
    # Behind the last activation the gradient is exact.
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        assert relative(ours[name], plain[name]) < 1e-5, name
    for other in (grads("lowmembp+remat"), grads("lowmembp+remat", scan_layers=True)):
        for name in ours:
            assert relative(other[name], ours[name]) < 1e-5, name
    # Behind the merged norms' Denses nothing changes.
    merged = grads("lowmembp", merged=True)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        assert relative(merged[name], ours[name]) < 1e-5, name


def test_checkpoint_round_trip(tmp_path):
    model, params, _ = load("llama_gqa", scan_layers=True)
    tensors = from_params(params, llama.hugging_face_name)
    write_tensors(tmp_path, tensors, model.config.to_json())
    for name, tensor in read_tensors(DATA / "llama_gqa").items():
        np.testing.assert_array_equal(tensors[name], tensor)
    assert LlamaConfig.from_json(tmp_path / "config.json") == model.config


def test_tied_head_is_refused_by_the_rules_of_others():
    _, params, _ = load("llama_gqa")
    with pytest.raises(ValueError, match="lm_head"):
        lm.merge_norm_affine(params, llama.NORM_RULES)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_keeps_what_the_arithmetic_says(scan_layers):
    """In units of tokens x hidden x 2 bytes: the paper's 15.4375 at a ratio of 2.7, without the
    second copy of the attention's output."""
    batch, tokens, hidden, ratio = 2, 384, 256, 2.75
    base = LlamaConfig(hidden, 1, 4, int(ratio * hidden), vocab_size=16)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "attention": "chunked"}

    def kept(layers):
        config = dataclasses.replace(base, num_hidden_layers=layers)
        compute = Compute("lowmembp", merged=True, **bf16)
        model = Llama(config, compute, scan_layers=scan_layers)
        loss = lambda params, ids: model.apply({"params": params}, ids).sum()  # noqa: E731
        return lm.memory.saved_bytes(loss, abstract_params(model), ids)

    unit = batch * tokens * hidden * 2
    # Norm outputs 2, q, k, v 3, attention's output 1; silu, up and their product; codes.
    units = 6 + 3 * ratio + ratio / 8
    # float32: rstd of two norms, a logsumexp a head.
    rows = (2 + 4) * batch * tokens * 4
    fewer, more = (2, 3) if scan_layers else (1, 2)
    assert kept(more) - kept(fewer) == pytest.approx(units * unit + rows, rel=1e-3)


@pytest.mark.gpu_compiler
def test_methods_compiled():
    """Peaks of a step with scanned layers."""
    config = LlamaConfig(256, 4, 4, 704, vocab_size=512)
    ids = jax.ShapeDtypeStruct((4, 512), jnp.int32)
    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "attention": "cudnn"}

    def peak(method):
        compute = Compute(method, merged=method.startswith("lowmembp"), **bf16)
        model = Llama(config, compute, scan_layers=True)
        fn = lambda params, ids: model.apply({"params": params}, ids, ids).sum()  # noqa: E731
        compiled = lm.memory.compile_for(jax.grad(fn), abstract_params(model), ids)
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms
        peaks = {method: peak(method) for method in METHODS if method != "dots"}
    assert peaks["full-remat"] < peaks["lowmembp+remat"] < peaks["lowmembp"]
    assert peaks["lowmembp"] < peaks["norm+activation"] < peaks["default"]
