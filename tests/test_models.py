"""The library's models without a checkpoint: shapes, errors, attention, and the planner's steps.

tests/examples/test_pytorch.py compares them with PyTorch's.
"""

import dataclasses
import itertools
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, initial, integers, normal
from tiny_models import TINY, TOKENS, inputs

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES, Compute, swin, vit
from lowmembp_jax.models.attention import attention, choose_attention, has_cudnn_attention
from lowmembp_jax.models.bert import BertClassifier
from lowmembp_jax.models.families import MODELS
from lowmembp_jax.models.workload import MODELS as STEPS
from lowmembp_jax.models.workload import Batch, make_optimizer, workload


def qkv(kv_heads=4, dtype=jnp.float32):
    shapes = (2, 9, 4, 8), (2, 9, kv_heads, 8), (2, 9, kv_heads, 8)
    return [normal(*shape, key=key, dtype=dtype) for key, shape in enumerate(shapes)]


def plain_attention(
    q, k, v, lengths=None, causal=False, bias=0, scale=None, soft_cap=None, window=None
):
    """A softmax in float64, without JAX."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    token, key = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    seen = np.full((len(q), 1, q.shape[1], k.shape[1]), True)
    if causal:
        seen &= key <= token
    if window is not None:
        seen &= key > token - window
    if lengths is not None:
        seen &= key < np.asarray(lengths)[:, None, None, None]
    scores = np.where(seen, scores + np.asarray(bias), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)


BIAS = np.random.default_rng(0).normal(size=(1, 4, 9, 9)).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "dtype", "kv_heads"),
    [
        ({}, "float32", 1),
        ({"causal": True}, "bfloat16", 4),
        ({"lengths": np.array([3, 9], np.int32), "bias": BIAS}, "float16", 1),
        ({"causal": True, "window": 4, "scale": 0.7}, "float32", 1),
        ({"causal": True, "window": 4, "soft_cap": 1.5}, "bfloat16", 1),
    ],
)
def test_attention_is_a_softmax(options, dtype, kv_heads, mixed_dtypes):
    args = qkv(kv_heads=kv_heads, dtype=dtype)
    given = {n: jnp.asarray(x, dtype) if n == "bias" else x for n, x in options.items()}
    got = attention(*args, "xla", **given)
    assert got.dtype == jnp.dtype(dtype)
    expected = plain_attention(*args, **options)
    tolerance = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(np.float32(got), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("causal", "lengths"), [(False, [3, 8]), (True, None)])
def test_cudnn_gets_even_numbers(causal, lengths, monkeypatch):
    """XLA's attention stands in for cuDNN, which needs a GPU."""
    args, xla = qkv(kv_heads=2), jax.nn.dot_product_attention
    bias = jnp.asarray(BIAS)
    lengths = None if lengths is None else jnp.array(lengths, jnp.int32)

    def grads(implementation):
        def total(args, bias):
            out = attention(*args, implementation, bias=bias, causal=causal, lengths=lengths)
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(args, bias)

    want = grads("xla")

    def even(q, k, v, *args, implementation, **kwargs):
        assert implementation == "cudnn" and q.shape[1] == k.shape[1] == 10
        return xla(q, k, v, *args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even)
    assert_close(grads("cudnn"), want, 1e-7, 2e-6)


@pytest.mark.parametrize(
    ("implementation", "given", "message"),
    [
        ("cudnn", {"soft_cap": 2.0, "causal": True}, "soft_cap, window: expected None, except"),
        ("xla", {"window": 3}, "soft_cap, window: expected None, except for causal attention"),
        ("xla", {"soft_cap": 1.0, "causal": True, "bias": BIAS}, "window: .*without a bias"),
    ],
)
def test_attention_refuses(implementation, given, message):
    with pytest.raises(ValueError, match=message):
        attention(*qkv(), implementation, **given)


def test_choice_of_attention():
    def choose(name, dtype="bfloat16", has_cudnn=True):
        return choose_attention(MODELS[name][1], dtype, has_cudnn)

    for name in ("vit-b16", "swin-t", "bert-base", "llama-7b", "qwen3-8b"):
        assert choose(name) == "cudnn"
        assert choose(name, "float32") == choose(name, has_cudnn=False) == "xla"
    # Heads of 256, soft caps and windows.
    assert choose("gemma-2-2b") == choose("gemma2-toy") == choose("gemma3_text-toy") == "xla"
    heads_of_12 = vit.ViTConfig(24, 1, 2, 24)
    assert choose_attention(heads_of_12, "bfloat16", True) == "xla"
    devices = [("gpu", "9.0", True), ("gpu", "7.5", False), ("gpu", "gfx90a", False)]
    for platform, capability, expected in [*devices, ("cpu", "", False)]:
        device = SimpleNamespace(platform=platform, compute_capability=capability)
        assert has_cudnn_attention(device) == expected


def test_even_tokens_for_cudnn(monkeypatch):
    """Swin has windows of 9 tokens."""
    images, config = inputs("vit")[0][:, :14, :14], swin.SwinConfig(8, (2,), (2,), 3, patch_size=2)
    computes = [Compute(attention=kind, merged=True) for kind in ("xla", "cudnn")]
    models = [FAMILIES["swin"].build(config, compute) for compute in computes]
    params = initial(models[0], images)["params"]

    def even(q, k, v, implementation, **kwargs):
        assert q.shape[1] % 2 == (implementation != "cudnn")
        return attention(q, k, v, "xla", **kwargs)

    monkeypatch.setattr(swin, "attention", even)
    expected, got = (jax.jit(model.apply)({"params": params}, images) for model in models)
    assert_close(got, expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("vit", (np.zeros((3, 40, 40, 3), np.float32),), r"images: expected \[batch, .*40, 40, 3"),
        ("bert", (np.zeros((1, 65), np.int32),), "input_ids: expected at most 64 .*, got 65"),
    ],
)
def test_inputs_that_do_not_fit(name, given, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].build(TINY[name], Compute()).init(jax.random.key(0), *given)


def test_padding_changes_nothing():
    model = BertClassifier(TINY["bert"], Compute(), pooling="mean")
    ids = inputs("bert")[0][:1]
    params = initial(model, ids)["params"]
    apply = jax.jit(model.apply)
    padded = apply({"params": params}, ids, jnp.array([20], jnp.int32))
    alone = apply({"params": params}, ids[:, :20])
    np.testing.assert_allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[("bert-base", 109.48), ("minilm", 22.71), ("roberta-base", 124.06), ("vit-b16", 86.57)],
        *[("swin-t", 28.29), ("llama-7b", 6738.42), ("qwen3-0.6b", 596.05)],
        *[("gemma-2-2b", 2614.34), ("gemma-3-1b", 999.89), ("llama-3-8b", 8030.26)],
    ],
)
def test_models_have_the_published_sizes(name, millions):
    """BertModel has a pooler, and RobertaModel has none; neither counts the classifier."""
    family, config = MODELS[name]
    model = family.build(config, Compute())
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs(family.name, config=config))
    parts = params["params"]
    if family.name in ("bert", "roberta"):
        parts = [parts[part] for part in ("bert", "pooler", "roberta") if part in parts]
    total = sum(leaf.size for leaf in jax.tree.leaves(parts)) / 1e6
    assert total == pytest.approx(millions, abs=0.01)


def test_a_merged_scale_of_zero_pads_with_numbers():
    params = {"scale": np.float32([0, 2, 1e-30]), "bias": np.float32([1, 1, 0])}
    padding = swin.MergedPadding(Compute()).apply({"params": params}, 3)
    np.testing.assert_array_equal(padding, np.float32([0, -0.5, 0]))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "full-remat"),
        pytest.param("llama", "compress+remat", marks=pytest.mark.slow),
        *[pytest.param(name, "lowmembp", marks=pytest.mark.slow) for name in ("qwen3", "gemma2")],
    ],
)
def test_slices_of_tokens(name, method):
    """A layer's parts on slices of 4 of 8 tokens: the same loss, gradients and parameters."""
    family, config = FAMILIES[name], TINY.get(name, FAMILIES[name].toy)
    ids = integers(2, 8, low=0, high=config.vocab_size)
    whole, tiled = (family.build(config, Compute(method, tiles=tiles)) for tiles in (None, 4))
    params = initial(whole, ids)["params"]
    shapes = jax.eval_shape(tiled.init, jax.random.key(0), ids)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(shapes)

    def gradients(model):
        run = lambda p: model.apply({"params": p}, ids, targets=ids) / ids.size  # noqa: E731
        return jax.jit(jax.value_and_grad(run))(params)

    (loss, grads), (value, ours) = gradients(whole), gradients(tiled)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert lm.gradient_distance(ours, grads).error < (0.09 if method == "compress+remat" else 1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_only_unrolled_layers_have_barriers_around_stored_bytes(scan, mixed_dtypes):
    compute = Compute("compress")
    model = FAMILIES["llama"].build(TINY["llama"], compute, "scan" if scan else "unrolled")
    params = initial(model, *inputs("llama"))["params"]
    loss = lambda params: model.apply({"params": params}, *inputs("llama")).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    barriers = re.findall(r"stablehlo.optimization_barrier .*", text)
    assert any("f8E4M3FN" in line for line in barriers) != scan


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("vit-ti16", {"tokens": 8}, "tokens: expected None, because vit takes images"),
        ("llama-tiny", {"method": "magic"}, "method: expected one of default, .* got 'magic'"),
        ("llama-tiny", {"dtype": "int8"}, "dtype: expected one of .* got 'int8'"),
        ("swin-t", {"layers": "scan"}, "layers: expected one of unrolled for swin, got 'scan'"),
        ("llama-tiny", {"tiles": 0}, "tiles: expected an integer from 1"),
        ("vit-ti16", {"tiles": 8}, "tiles: expected None, because vit is no decoder"),
        ("llama-tiny", {"update": "backward", "method": "offload"}, "update: .* method 'offload'"),
        # Updates in the backward are for equal layers.
        ("gemma-2-2b", {"update": "backward"}, r"update: .*, because .* not scanned or"),
        ("llama-tiny", {"update": "backward", "layers": "unrolled"}, "update: .* not scanned or"),
    ],
)
def test_bad_options(model, options, message, jax_defaults):
    with pytest.raises(ValueError, match=message):
        STEPS[model](**options)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_compressed_optimizer_state(jax_defaults):
    options = {"optimizer_state": "8bit", "master_weights": "24bit"}
    small, large = STEPS["llama-tiny"](**options).args, STEPS["llama-tiny"]().args
    assert nbytes(small[0]) == nbytes(large[0]) / 2 and nbytes(small[1]) < nbytes(large[1]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_an_update_in_the_backward(tied, jax_defaults):
    """The same parameters as after a step with all gradients, without clipping."""
    family = FAMILIES["llama"]
    config = dataclasses.replace(family.toy, tie_word_embeddings=tied, num_hidden_layers=2)
    make = partial(workload, family, config, batch=2, tokens=8, dtype="float32", layers="scan")
    work = make(update="backward")
    keys = itertools.count()
    draw = lambda x: 0.1 * normal(*x.shape, key=next(keys), dtype=x.dtype)  # noqa: E731
    stack, first, last = jax.tree.map(draw, work.args[0])
    ids = integers(2, 8, low=0, high=config.vocab_size)
    batch = Batch((ids,), ids)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), work.args[1])
    new, _, loss = jax.jit(work.step)((stack, first, last), zeros, batch)
    params = {"layers": stack, **first, **last}
    value, grads = jax.jit(jax.value_and_grad(make().loss))(params, batch)
    optimizer = make_optimizer(clips=False)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    want = optax.apply_updates(params, updates)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    got = {"layers": new[0], **new[1], **new[2]}
    moved = [jax.tree.map(jnp.subtract, one, params) for one in (got, want)]
    assert lm.gradient_distance(*moved).error < 2e-2  # the sign of a gradient near 0


BY_DEFAULT = [("llama", "lowmembp+remat"), ("vit", "compress")]
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(TINY, lm.memory.METHODS)
]


def matrix_flops(cost, phase):
    """The FLOPs of the model's products. LLaMA's loss computes its gradients in the forward."""
    return sum(
        kernel.flops * kernel.count
        for kernel in cost.kernels
        if kernel.kind == "matrix product"
        and kernel.phase == phase
        and "linear_cross_entropy" not in kernel.op_name
    )


@pytest.mark.compiled
@pytest.mark.parametrize(("family", "method"), CASES)
def test_every_family_with_every_method(family, method, jax_defaults):
    """The planner's step, compiled for an H200 without a GPU."""
    tokens = None if family in ("vit", "swin") else TOKENS
    # The batch is so large that activations take more than weights.
    made = workload(FAMILIES[family], TINY[family], batch=64, method=method, tokens=tokens)
    # No GPU can time any product. JAX 0.12 compiles several of each all the same; 0.11 must.
    options = {} if jax.__version__.startswith("0.11.") else {"xla_gpu_autotune_level": 0}
    given = {"donate_argnums": made.donate_argnums, "keep_unused": True}
    program = lm.memory.compile_for(made.step, *made.args, compiler_options=options, **given)
    cost = lm.memory.cost(program, lm.memory.get_device("h200"))
    memory, state = program.memory_analysis(), made.args[:2]
    # The state goes where it was, in place, and only the loss comes out beside it.
    specs = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert specs(program.out_info[:2]) == specs(state)
    assert memory.alias_size_in_bytes == nbytes(state)
    assert memory.output_size_in_bytes - nbytes(state) < 4096
    attention = [kernel for kernel in cost.kernels if kernel.kind == "attention"]
    assert {kernel.phase for kernel in attention} >= {"forward", "backward"}
    # cuDNN's: XLA's own attention would be matrix products.
    assert all(kernel.opcode == "custom-call" for kernel in attention)
    # Factors have 16 bits everywhere but in the classifiers of BERT and RoBERTa.
    flops = {dtype: part.flops for dtype, part in cost.by("dtype").items() if part.flops}
    others = sum(flops.values()) - flops["bf16"]
    assert others < (0.001 if family in ("bert", "roberta") else 1e-9) * flops["bf16"]
    forward, backward, again = (
        matrix_flops(cost, phase) for phase in ("forward", "backward", "recomputation")
    )
    assert 1.95 < backward / forward < 2.1
    # The norms of BERT and RoBERTa read the last product of a layer, and train their scales.
    is_last_needed = family in ("bert", "roberta")
    least, most = {
        **dict.fromkeys(("dots", "products", "offload", "compress"), (0, 0.05)),
        **dict.fromkeys(("full-remat", "compress+remat", "compress+remat+offload"), (0.6, 1.01)),
        "lowmembp+remat": (0.25, 1.01 if is_last_needed else 0.8),
    }.get(method, (0, 0.07))
    assert least <= again / forward <= most
