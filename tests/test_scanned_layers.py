"""ViT, Swin, BERT and RoBERTa with their layers in one `nn.scan`, against PyTorch; a LLaMA's are in
test_decoders.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, to_params
from lowmembp_examples.lora import apply_lora
from model_tests import Case, assert_close, assert_pytorchs, step_gelu

import lowmembp_jax as lm
from lowmembp_jax.models import bert, swin, vit
from lowmembp_jax.models.families import FAMILIES
from lowmembp_jax.models.layers import Compute

CASES = {
    name: Case(name, (module, "gelu"), scan_layers=True)
    for name, module in {"vit": vit, "swin": swin, "bert": bert, "roberta": bert}.items()
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["default", "full-remat", "offload", "compress"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pytorchs(name, method):
    case = CASES[name]
    # Without a dtype, what is compressed has no rounding.
    assert_pytorchs(case, case.run(Compute(method, compress_dtype=None)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "merged"),
    [("vit", False), ("vit", True), ("swin", False), ("swin", True), ("bert", False)],
)
def test_only_the_slope_of_the_activation_is_not_exact(name, merged):
    gradients = CASES[name].run(Compute("lowmembp", merged=merged))
    assert_close(gradients, CASES[name].run(Compute("default", merged=merged), step_gelu))


@pytest.mark.parametrize("name", CASES)
def test_saved_as_it_was(name):
    case = CASES[name]
    assert "layers" in str(jax.tree.structure(case.params))
    saved = from_params(case.params, case.module.hugging_face_name)
    # A Swin's checkpoint has indices besides.
    floating = {name: x for name, x in case.tensors.items() if x.dtype != np.int64}
    assert saved.keys() == floating.keys()
    jax.tree.map(np.testing.assert_array_equal, saved, floating)


@pytest.mark.slow
def test_pairs_of_a_swin():
    """More pairs than one, against layers that are not scanned."""
    config = swin.SwinConfig(8, (4, 2), (2, 2), window_size=4, patch_size=2, num_labels=5)
    images = CASES["swin"].inputs[0][:, :18, :18]  # maps of 9 x 9 and 5 x 5
    unrolled, scanned = swin.Swin(config), swin.Swin(config, scan_layers=True)
    params = unrolled.init(jax.random.key(0), images)["params"]
    expected = unrolled.apply({"params": params}, images)
    abstract = jax.eval_shape(scanned.init, jax.random.key(0), images)["params"]
    assert abstract["stage_0"]["layers"]["odd"]["query"]["kernel"].shape == (2, 8, 2, 4)
    params = to_params(
        from_params(params, swin.hugging_face_name), abstract, swin.hugging_face_name
    )
    np.testing.assert_allclose(scanned.apply({"params": params}, images), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_one_pair_is_computed_again(mixed_dtypes):
    """A loop of one step, which XLA opens."""
    images = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.bfloat16)
    config = swin.SwinConfig(32, (2,), (2,), window_size=4, num_labels=10)

    def temporary(method):
        model = swin.Swin(config, Compute(method, jnp.bfloat16), scan_layers=True)
        params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
        loss = lambda params, images: model.apply({"params": params}, images).sum()  # noqa: E731
        compiled = lm.memory.compile_for(jax.grad(loss), params, images)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary("full-remat") < 0.6 * temporary("default")


def test_a_layer_without_its_pair():
    model = swin.Swin(swin.SwinConfig(8, (2, 3), (2, 2), window_size=4), scan_layers=True)
    with pytest.raises(ValueError, match=r"scan_layers: expected False .* depths=\(2, 3\)"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))


def test_a_norm_between_layers_is_not_merged():
    family = FAMILIES["bert"]
    assert not family.merges_norms("scan") and FAMILIES["vit"].merges_norms("scan")
    model = family.build(family.toy, Compute("lowmembp", merged=True), layers="scan")
    with pytest.raises(ValueError, match=r"scan_layers: expected False with compute\.merged"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 4), jnp.int32))


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_lora_beside_stacked_weights(name):
    case = CASES[name]
    model = apply_lora(FAMILIES[name].build(case.config, Compute(), layers="scan"), "lora-all")
    params = jax.eval_shape(model.init, jax.random.key(0), *case.inputs)["params"]
    layers = params[name]["layers"] if name == "bert" else params["layers"]
    assert layers["intermediate"]["kernel_lora_a"].shape == (2, 48, 8)
