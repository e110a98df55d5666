"""LoRA and QLoRA: outputs, gradients, what is trained, and the planner's factory."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import lora
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import normal
from lora import add_lora, apply_lora, combine, fold_lora, partition
from tiny_models import TINY, inputs

import lowmembp_jax as lm
from lowmembp_jax.cli._factories import function_of_file
from lowmembp_jax.models import FAMILIES, Compute

RANK, ALPHA = 4, 12.0


@functools.cache
def base(family):
    """Returns a model, and its parameters, drawn at random."""
    model = FAMILIES[family].build(TINY[family], Compute("lowmembp"))
    abstract = jax.eval_shape(model.init, jax.random.key(0), *inputs(family))["params"]
    draw = np.random.default_rng(1)
    params = {
        path: jnp.asarray(draw.normal(path[-1] == "scale", 0.1, leaf.shape), leaf.dtype)
        for path, leaf in flatten_dict(abstract).items()
    }
    return model, unflatten_dict(params)


def with_lora(train, family):
    """Returns the model with LoRA, and its parameters with random B."""
    plain, params = base(family)
    model = apply_lora(plain, train, RANK, ALPHA)
    params = flatten_dict(add_lora(model, params, jax.random.key(1), *inputs(family)))
    for path, leaf in params.items():
        if path[-1].endswith("_lora_b"):
            assert not leaf.any()
            params[path] = 0.05 * normal(*leaf.shape, dtype=leaf.dtype)
    return model, unflatten_dict(params)


@pytest.mark.parametrize("train", ["lora-qv", pytest.param("qlora-all", marks=pytest.mark.slow)])
def test_gradients_follow_from_the_weights(train):
    plain, _ = base("bert")
    model, params = with_lora(train, "bert")
    trained, frozen = partition(params, train)

    def loss(model, params):
        return jnp.square(model.apply({"params": params}, *inputs("bert"))).sum()

    of_lora = lambda trained: loss(model, combine(trained, frozen, jnp.float32))  # noqa: E731
    got = jax.device_get(flatten_dict(jax.jit(jax.grad(of_lora))(trained)))
    of_folded = jax.jit(jax.grad(functools.partial(loss, plain)))
    weights = jax.device_get(flatten_dict(of_folded(fold_lora(params, ALPHA / RANK))))
    path, leaves = ("bert", "layer_1", "query"), jax.device_get(flatten_dict(params))
    dw = weights[(*path, "kernel")].reshape(64, -1)
    a, b = (leaves[(*path, f"kernel_lora_{part}")] for part in "ab")
    scale = ALPHA / RANK
    want = {"a": scale * dw @ b.reshape(RANK, -1).T, "b": scale * a.T @ dw}
    for part, gradient in want.items():
        found = got[(*path, f"kernel_lora_{part}")].reshape(gradient.shape)
        np.testing.assert_allclose(found, gradient, atol=1e-4 * np.abs(gradient).max())
    head = ("classifier", "kernel")
    np.testing.assert_allclose(got[head], weights[head], atol=1e-4 * np.abs(weights[head]).max())


@pytest.mark.parametrize(("train", "leaves"), [("lora-qv", "ab"), ("lora-fa-qv", "b")])
def test_what_is_trained(train, leaves):
    model = apply_lora(base("bert")[0], train, RANK)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs("bert"))["params"]
    trained, frozen = (flatten_dict(tree) for tree in partition(params, train))
    assert trained.keys() | frozen.keys() == flatten_dict(params).keys()
    names = {f"kernel_lora_{part}" for part in leaves}
    layers = [path for path in trained if path[0] == "bert"]
    assert {path[-1] for path in layers} == names
    assert {path[-2] for path in layers} == {"query", "value"}
    assert {path[0] for path in trained} == {"bert", "classifier"}


def test_errors():
    model, _ = base("llama")
    with pytest.raises(ValueError, match=r"apply_lora: train: expected one of full, .* got 'x'"):
        apply_lora(model, "x")
    mixed = FAMILIES["llama"].build(TINY["llama"], Compute(dtype=jnp.bfloat16))
    with pytest.raises(ValueError, match=r"expected equal dtypes for train='lora-qv', got param_d"):
        apply_lora(mixed, "lora-qv")


@pytest.mark.parametrize("train", ["lora-all", pytest.param("qlora-qv", marks=pytest.mark.slow)])
def test_the_planners_factory(train):
    path = Path(lora.__file__)
    make = function_of_file(f"{path}:workload")
    work = make(model="llama-tiny", train=train, method="compress", batch=2, tokens=16)
    trained, _, frozen, _ = work.args
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    assert jnp.dtype("float32") not in {leaf.dtype for leaf in jax.tree.leaves(frozen)}
    saved = lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=work.loss_argnums)
    assert saved > 0
    out = jax.eval_shape(work.step, *work.args)
    assert jax.tree.structure(out[:2]) == jax.tree.structure(work.args[:2])
    with pytest.raises(ValueError, match=r"workload: model: expected one of .* got 'x'"):
        make(model="x")
