"""examples/models/vit.py against PyTorch's ViT, and Google's checkpoints."""

import dataclasses

import jax
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, to_params
from lowmembp_jax.models.vit_npz import (
    UNUSED_WITH_NEW_HEAD,
    npz_config,
    npz_name,
    resize_positions,
)
from model_tests import Case, ClassifierTests, assert_close

from lowmembp_jax.models import vit
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.layers import Compute

pytestmark = pytest.mark.slow

CASE, SCANNED = (Case("vit", (vit, "gelu"), scan_layers=scan) for scan in (False, True))


class TestViT(ClassifierTests):
    case = CASE


@pytest.mark.parametrize("merged", [False, True])
def test_even_tokens_for_cudnn(merged, monkeypatch):
    """17 tokens; another implementation stands in for cuDNN, which needs a GPU."""

    def even(q, k, v, implementation, **kwargs):
        assert implementation == "cudnn" and q.shape[1] == 18
        return attention(q, k, v, "xla", **kwargs)

    monkeypatch.setattr(vit, "attention", even)
    gradients = CASE.run(Compute("default", attention="cudnn", merged=merged))
    monkeypatch.undo()
    assert_close(gradients, CASE.run(Compute("default", merged=merged)))


def test_images_of_another_size():
    with pytest.raises(ValueError, match=r"images: expected \[batch, .*, got \(3, 40, 40, 3\)"):
        CASE.logits(Compute(), inputs=[np.zeros((3, 40, 40, 3), np.float32)])


def npz():
    """Google's names and layout, from Hugging Face's."""
    tensors, hidden, heads = CASE.tensors, 48, 4

    def dense(source, target, shape, bias_shape=None):
        return {
            f"{target}/kernel": tensors[f"{source}.weight"].T.reshape(shape),
            f"{target}/bias": tensors[f"{source}.bias"].reshape(bias_shape or shape[-1:]),
        }

    def norm(source, target):
        scale, bias = tensors[f"{source}.weight"], tensors[f"{source}.bias"]
        return {f"{target}/scale": scale, f"{target}/bias": bias}

    embeddings = "vit.embeddings."
    projection = f"{embeddings}patch_embeddings.projection"
    arrays = {
        "cls": tensors[f"{embeddings}cls_token"],
        "Transformer/posembed_input/pos_embedding": tensors[f"{embeddings}position_embeddings"],
        "embedding/kernel": tensors[f"{projection}.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": tensors[f"{projection}.bias"],
        **norm("vit.layernorm", "Transformer/encoder_norm"),
        **dense("classifier", "head", (hidden, 5)),
    }
    split = (heads, hidden // heads)
    for i in range(2):
        source, target = f"vit.encoder.layer.{i}.", f"Transformer/encoderblock_{i}/"
        attention = f"{target}MultiHeadDotProductAttention_1/"
        for name in ("query", "key", "value"):
            given = f"{source}attention.attention.{name}"
            arrays |= dense(given, attention + name, (hidden, *split), split)
        arrays |= {
            **norm(f"{source}layernorm_before", f"{target}LayerNorm_0"),
            **norm(f"{source}layernorm_after", f"{target}LayerNorm_2"),
            **dense(f"{source}attention.output.dense", f"{attention}out", (*split, hidden)),
            **dense(f"{source}intermediate.dense", f"{target}MlpBlock_3/Dense_0", (hidden, 96)),
            **dense(f"{source}output.dense", f"{target}MlpBlock_3/Dense_1", (96, hidden)),
        }
    return arrays


def test_npz_has_the_same_logits_and_is_saved_as_it_was(tmp_path):
    np.savez(tmp_path / "tiny.npz", **npz())
    arrays = dict(np.load(tmp_path / "tiny.npz"))
    # What Google's code computes differs from PyTorch's in these two.
    assert npz_config(arrays).layer_norm_eps == 1e-6
    assert npz_config(arrays).hidden_act == "gelu_pytorch_tanh"
    config = npz_config(arrays, layer_norm_eps=1e-12, hidden_act="gelu")
    assert config == CASE.config
    params = to_params(arrays, CASE.abstract(), npz_name, layout="flax")
    np.testing.assert_allclose(CASE.logits(Compute(), params), CASE.io["logits"], atol=2e-5)
    again = from_params(params, npz_name, layout="flax")
    assert again.keys() == arrays.keys()
    jax.tree.map(np.testing.assert_array_equal, again, arrays)
    scanned = from_params(SCANNED.params, npz_name, layout="flax")
    jax.tree.map(np.testing.assert_array_equal, scanned, arrays)


def test_tanh_gelu():
    model = vit.ViT(dataclasses.replace(CASE.config, hidden_act="gelu_pytorch_tanh"))
    logits = model.apply({"params": CASE.params}, *CASE.inputs)
    difference = np.abs(logits - CASE.io["logits"]).max()
    assert 1e-5 < difference < 1e-2


@pytest.mark.parametrize("head", [False, True])
def test_npz_with_a_new_head(head):
    arrays = npz() | {"pre_logits/kernel": np.zeros((48, 48)), "pre_logits/bias": np.zeros(48)}
    with pytest.raises(ValueError, match="unknown pre_logits/kernel"):
        to_params(arrays, CASE.abstract(), npz_name, layout="flax")
    with pytest.raises(ValueError, match="missing embedding/kernel"):
        npz_config({name: arrays[name] for name in arrays if name != "embedding/kernel"})
    if not head:
        del arrays["head/kernel"], arrays["head/bias"]
        with pytest.raises(ValueError, match="missing head/bias"):
            npz_config(arrays)
    assert npz_config(arrays, num_labels=7).num_labels == 7
    new = {"kernel": np.ones((48, 7), np.float32), "bias": np.ones(7, np.float32)}
    options = {"layout": "flax", "initial": {"classifier": new}}
    params = to_params(arrays, CASE.abstract(), npz_name, UNUSED_WITH_NEW_HEAD, **options)
    assert params["classifier"] is new
    np.testing.assert_array_equal(params["cls"], arrays["cls"])


def test_resized_positions():
    rows, columns = np.meshgrid(np.linspace(0, 1, 4), np.linspace(3, 5, 4), indexing="ij")
    ramp = np.stack([rows, columns], -1).reshape(1, 16, 2)
    positions = np.concatenate([np.full((1, 1, 2), 9), ramp], 1).astype(np.float32)
    np.testing.assert_array_equal(resize_positions(positions, 4), positions)
    resized = resize_positions(positions, 7)
    rows, columns = np.meshgrid(np.linspace(0, 1, 7), np.linspace(3, 5, 7), indexing="ij")
    expected = np.stack([rows, columns], -1).reshape(49, 2)
    np.testing.assert_allclose(resized[0, 1:], expected, atol=1e-5)
    np.testing.assert_array_equal(resized[0, 0], 9)
    assert resized.dtype == np.float32
    with pytest.raises(ValueError, match=r"expected .* got \(1, 16, 2\)"):
        resize_positions(positions[:, 1:], 7)
