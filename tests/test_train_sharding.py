"""Meshes: how parameters lie on 8 devices, and that their losses equal one device's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.lora import add_lora, apply_lora, partition
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.sharding import make_mesh, own_part, put, put_batch, shardings
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step

from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import CONFIGS, Llama
from lowmembp_jax.models.vit import ViT, ViTConfig

pytestmark = pytest.mark.slow

MESHES = ["data=8", "fsdp=8", "data=2 tensor=4", "data=2 fsdp=2 tensor=2"]


def mesh_of(axes, devices=None):
    return make_mesh(axes.split(), devices or jax.devices())


def images(seed):
    rng = np.random.default_rng(seed)
    pixels = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
    return ImageBatch(pixels, rng.integers(8, size=16).astype(np.int32), np.ones(16, bool))


@pytest.fixture(scope="module")
def vit():
    config = ViTConfig(64, 1, 4, 128, image_size=8, patch_size=4, num_labels=8)
    model = ViT(config, Compute("lowmembp", merged=True))
    return model, jax.device_get(jax.jit(model.init)(jax.random.key(0), images(0).images))["params"]


def run(model, params, mesh, train="full"):
    """The losses and gradient norms of 3 steps, and where the state lies."""
    optimizer = make_optimizer(OptimizerConfig(1e-2, warmup=0), 10)
    trained, frozen = (put(tree, mesh) for tree in partition(params, train))
    make_state = partial(init_state, optimizer=optimizer, dtype=jnp.float32)
    parts = shardings(jax.eval_shape(make_state, trained), mesh)
    state = jax.jit(make_state, out_shardings=parts)(trained)
    step = make_step(make_loss("image-classification", model), optimizer)
    step = jax.jit(step, donate_argnums=0, out_shardings=(parts, None))
    numbers = []
    for seed in range(3):
        state, metrics = step(state, frozen, put_batch(images(seed), mesh))
        numbers.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(numbers), state


@pytest.fixture(scope="module")
def of_one_device(vit):
    return run(*vit, mesh_of("data=1", jax.devices()[:1]))[0]


@pytest.mark.parametrize("axes", MESHES)
def test_losses_are_those_of_one_device(vit, of_one_device, axes):
    mesh = mesh_of(axes)
    numbers, state = run(*vit, mesh)
    np.testing.assert_allclose(numbers, of_one_device, rtol=2e-5)
    kernel = state.params["layer_0"]["intermediate"]["kernel"]
    ways = mesh.shape["fsdp"] * mesh.shape["tensor"]
    mean = state.opt_state[1][0].mu["layer_0"]["intermediate"]["kernel"]
    for array in (kernel, mean):
        assert array.addressable_shards[0].data.size == array.size // ways


def test_partition_specs(vit):
    mesh = mesh_of("fsdp=2 tensor=4")
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings(vit[1], mesh))
    layer = specs["layer_0"]
    assert layer["query"] == {"kernel": P("fsdp", "tensor", None), "bias": P("tensor", None)}
    assert layer["attention_output"] == {"kernel": P("tensor", None, "fsdp"), "bias": P(None)}
    assert layer["intermediate"] == {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}
    assert layer["output"] == {"kernel": P("tensor", "fsdp"), "bias": P(None)}
    assert specs["classifier"]["bias"] == P(None)
    # 3 heads cannot be divided by 4: no axis is used that does not fit.
    odd = {"query": {"kernel": jnp.zeros((96, 3, 32))}}
    assert shardings(odd, mesh)["query"]["kernel"].spec == P("fsdp", None, None)


def test_partition_specs_of_qlora_and_scanned_layers():
    config, mesh = CONFIGS["llama-tiny"], mesh_of("fsdp=4 tensor=2")
    model = apply_lora(Llama(config, scan_layers=True), "qlora-all")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings(params, mesh))["layers"]
    assert specs["query"]["kernel_lora_b"] == P(None, None, "tensor")
    assert specs["down"]["kernel_lora_a"] == P(None, "tensor", "fsdp")
    query, down = specs["query"]["kernel"].array, specs["down"]["kernel"].array
    assert query.qvalue == P(None, "fsdp", "tensor", None)
    assert query.scale == P(None, None, "tensor", None)
    assert down.qvalue == P(None, "tensor", "fsdp")


def test_qlora_losses_are_those_of_one_device(vit):
    model = apply_lora(vit[0], "qlora-all", rank=8)
    params = add_lora(model, vit[1], jax.random.key(1), images(0).images)
    single, _ = run(model, params, mesh_of("data=1", jax.devices()[:1]), "qlora-all")
    sharded, state = run(model, params, mesh_of("data=2 fsdp=2 tensor=2"), "qlora-all")
    np.testing.assert_allclose(sharded, single, rtol=2e-5)
    b = state.params["layer_0"]["query"]["kernel_lora_b"]
    assert b.addressable_shards[0].data.shape == (8, 32)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("rows=8", "AXIS=SIZE with the axes data, fsdp, tensor.*got 'rows=8'"),
        ("data=two", "got 'data=two'"),
        ("data=8 data=1", "each once"),
        ("data=0", "got 'data=0'"),
        ("data=2 fsdp=2", "expected sizes for 8 devices, got sizes for 4"),
    ],
)
def test_wrong_meshes(axes, message):
    with pytest.raises(UsageError, match=f"--mesh.*{message}"):
        mesh_of(axes)


def test_parts_of_a_batch():
    assert own_part(mesh_of("data=4 tensor=2"), 16) == (0, 1)
    with pytest.raises(UsageError, match=r"expected a multiple of 8, .* got 12"):
        own_part(mesh_of("data=4 fsdp=2"), 12)
