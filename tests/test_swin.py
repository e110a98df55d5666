"""examples/models/swin.py against PyTorch's Swin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from lowmembp_examples.checkpoints import from_params
from model_tests import Case, ClassifierTests, assert_close, assert_pytorchs, step_gelu

import lowmembp_jax as lm
from lowmembp_jax.models import swin
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.swin_checkpoint import buffers
from lowmembp_jax.models.windows import Windows, relative_position_index

pytestmark = pytest.mark.slow

PADDED, WHOLE = (Case(name, (swin, "gelu")) for name in ("swin_padded", "swin"))
WINDOWS = [Windows(8, 8, 4, 2), Windows(9, 13, 4, 2), Windows(5, 3, 3, 0), Windows(16, 11, 7, 3)]


class TestSwin(ClassifierTests):
    """Maps of 9 x 9 and 5 x 5 in windows of 4 x 4."""

    case = PADDED

    def saved(self):
        params = from_params(self.case.params, swin.hugging_face_name)
        return params | buffers(self.case.config)


def test_whole_windows():
    """Maps of 16 x 16 and 8 x 8 in windows of 4 x 4."""
    assert_pytorchs(WHOLE, WHOLE.run(Compute()))
    gradients = WHOLE.run(Compute("lowmembp", merged=True))
    assert_close(gradients, WHOLE.run(Compute(merged=True), step_gelu))
    # With nothing to pad, what would be padded with is not used.
    assert not np.any(gradients["stage_0"]["layer_0"]["norm1"]["bias"])


@pytest.mark.parametrize("merged", [False, True])
def test_even_tokens_for_cudnn(merged, monkeypatch):
    """Windows of 9 tokens; another implementation stands in for cuDNN, which needs a GPU."""
    config = swin.SwinConfig(8, (2,), (2,), window_size=3, patch_size=2, num_labels=5)
    images = PADDED.inputs[0][:, :14, :14]
    models = [
        swin.Swin(config, Compute(attention=name, merged=merged)) for name in ("xla", "cudnn")
    ]
    params = models[0].init(jax.random.key(0), images)["params"]

    def even(q, k, v, implementation, **kwargs):
        assert q.shape[1] == (10 if implementation == "cudnn" else 9)
        return attention(q, k, v, "xla", **kwargs)

    monkeypatch.setattr(swin, "attention", even)

    def loss(params, model):
        logits = model.apply({"params": params}, images)
        return jnp.square(logits).sum(), logits

    step = quick_jit(jax.grad(loss, has_aux=True), static_argnums=1)
    (expected, plain), (gradients, logits) = (step(params, model) for model in models)
    np.testing.assert_allclose(logits, plain, atol=2e-5)
    assert_close(gradients, expected)


@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_hold_the_map(windows):
    shape = (2, windows.height, windows.width, 3)
    x = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    split = windows.split(jnp.asarray(x))
    np.testing.assert_array_equal(windows.join(split), x)
    is_padding = np.broadcast_to(windows.is_padding()[None, ..., None], split.shape)
    np.testing.assert_array_equal(np.asarray(split) == 0, is_padding)


@pytest.mark.parametrize("windows", [windows for windows in WINDOWS if windows.shift])
def test_mask_keeps_apart_what_the_roll_brought_together(windows):
    size = windows.size
    height, width = (-(-length // size) * size for length in (windows.height, windows.width))
    padded = Windows(height, width, size, windows.shift)
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    places = np.stack([rows, columns], -1)[None].astype(np.float32)
    places = np.asarray(padded.split(jnp.asarray(places)))[0]
    distance = np.abs(places[:, :, None] - places[:, None]).max(-1)
    np.testing.assert_array_equal(windows.mask(), np.where(distance < size, 0, -100))


def test_relative_position_index():
    """It is the checkpoint's, and smaller windows use the same offsets."""
    tensor = PADDED.tensors["swin.encoder.layers.0.blocks.1.attention.self.relative_position_index"]
    np.testing.assert_array_equal(relative_position_index(4, 4), tensor)
    whole = relative_position_index(7, 7).reshape(7, 7, 7, 7)
    expected = whole[:3, :3, :3, :3].reshape(9, 9)
    np.testing.assert_array_equal(relative_position_index(3, 7), expected)


def test_map_smaller_than_the_window():
    images = PADDED.inputs[0][:, :6, :8]  # maps of 3 x 4 and 2 x 2
    plain = PADDED.logits(Compute(), inputs=[images])
    merged = PADDED.logits(Compute("lowmembp", merged=True), inputs=[images])
    np.testing.assert_allclose(merged, plain, atol=2e-5)


def test_images_are_padded_to_whole_patches():
    images = PADDED.inputs[0][:, :17, :17]
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)))
    logits = [PADDED.logits(Compute(), inputs=[each]) for each in (images, padded)]
    np.testing.assert_array_equal(*logits)


def test_merging_without_kept_padding_would_be_wrong():
    """The padded case depends on what `MergedPadding` pads with."""
    params = jax.tree.map(lambda x: x, PADDED.merged)
    for stage in ("stage_0", "stage_1"):
        for layer in ("layer_0", "layer_1"):
            norm = params[stage][layer]["norm1"]
            norm["bias"] = np.zeros_like(norm["bias"])
    wrong = PADDED.logits(Compute(merged=True), params)
    assert np.abs(wrong - PADDED.io["logits"]).max() > 1e-3


def test_scale_of_zero_pads_with_numbers():
    scale, bias = np.float32([0, 2, 1e-30]), np.float32([1, 1, 0])
    params = {"scale": scale, "bias": bias}
    padding = swin.MergedPadding(Compute()).apply({"params": params}, 3)
    np.testing.assert_array_equal(padding, np.float32([0, -0.5, 0]))


@pytest.mark.gpu_compiler
def test_compiled_for_a_gpu_with_flash_attention():
    """Windows of 49 tokens with a bias that has a gradient, in cuDNN."""
    config = swin.SwinConfig(32, (2,), (2,), image_size=56, num_labels=10)
    compute = Compute("lowmembp", jnp.bfloat16, attention="cudnn", merged=True)
    model = swin.Swin(config, compute)
    images = jax.ShapeDtypeStruct((8, 56, 56, 3), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]

    def loss(params, images):
        return jax.nn.logsumexp(model.apply({"params": params}, images), axis=-1).mean()

    text = lm.memory.compile_for(jax.grad(loss), params, images).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text
