"""LoRA in the models of all five families: what they compute, and what is trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import quick_jit
from lora_reference import dense_weights, randomized
from lowmembp_examples.lora import DENSES, add_lora, apply_lora, combine, partition
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.models import FAMILIES
from tiny_models import TINY, inputs

import lowmembp_jax as lm

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 12.0


@functools.cache
def base(family, method="lowmembp", **fields):
    """A model, its parameters and what it gives, jitted."""
    model = FAMILIES[family].model(TINY[family], Compute(method), **fields)
    abstract = jax.eval_shape(model.init, jax.random.key(0), *inputs(family))["params"]
    draw = np.random.default_rng(1)
    params = {
        path: jnp.asarray(draw.normal(path[-1] == "scale", 0.1, leaf.shape), leaf.dtype)
        for path, leaf in flatten_dict(abstract).items()
    }
    return model, unflatten_dict(params), quick_jit(model.apply)


@pytest.mark.parametrize(
    ("family", "train", "fields"),
    [
        *((family, "lora-all", {}) for family in TINY if family != "roberta"),
        pytest.param("roberta", "lora-all", {}, marks=pytest.mark.slow),  # as BERT's
        *(pytest.param(family, "qlora-all", {}, marks=pytest.mark.slow) for family in TINY),
        ("llama", "lora-fa-all", {"scan_layers": True, "method": "dots"}),
        ("llama", "qlora-qv", {"method": "lowmembp+remat"}),
        ("llama", "qlora-all", {"scan_layers": True}),
    ],
    ids=str,
)
def test_output(family, train, fields):
    """That of the base model at first, whose weights QLoRA rounds; then that of W + alpha / rank
    A B in every Dense."""
    plain, params, apply_plain = base(family, **fields)
    args = inputs(family)
    model = apply_lora(plain, train, RANK, ALPHA)
    with_lora = add_lora(model, params, jax.random.key(1), *args)
    abstract = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
    assert jax.tree.structure(with_lora) == jax.tree.structure(abstract)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, with_lora, abstract))
    apply = quick_jit(model.apply)
    got = apply({"params": with_lora}, *args)
    want = apply_plain({"params": params}, *args)
    if not train.startswith("qlora"):
        # B is 0; the two programs round otherwise.
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    else:
        # NF4's error in each weight is 9% of it, see test_lora.py.
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 0 < error < 0.5
    with_lora = randomized(with_lora)
    got = apply({"params": with_lora}, *args)
    weights = unflatten_dict(jax.jit(dense_weights)(with_lora, ALPHA / RANK))
    want = apply_plain({"params": weights}, *args)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("family", TINY)
def test_what_gets_a_gradient(family):
    """A and B of every Dense and the modules of the head, and nothing else."""
    plain, params, _ = base(family)
    args = inputs(family)
    model = apply_lora(plain, "lora-all", RANK, ALPHA)
    params = randomized(add_lora(model, params, jax.random.key(1), *args))
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


@pytest.mark.parametrize("family", TINY)
def test_what_is_kept(family):
    """The less is trained, the less: no input of a frozen Dense, nor of a frozen A."""
    plain, _, _ = base(family)
    args = inputs(family)

    def kept(train):
        model = apply_lora(plain, train, rank=1)
        abstract = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
        trained, frozen = partition(abstract, train)

        def loss(trained, frozen):
            return model.apply({"params": combine(trained, frozen, jnp.float32)}, *args).sum()

        return lm.memory.saved_bytes(loss, trained, frozen, argnums=0)

    everything, every_dense, q_and_v, no_a = map(
        kept, ["full", "lora-all", "lora-qv", "lora-fa-qv"]
    )
    assert everything > every_dense > q_and_v > no_a
