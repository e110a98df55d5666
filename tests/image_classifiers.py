"""What every image classifier of examples/models must do: tests to inherit from."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors
from lowmembp_examples.models.common import Compute

import lowmembp_jax as lm

DATA = Path(__file__).parent / "data" / "hf_tiny"
EXACT = ["default", "norm+activation", "dots", "full-remat"]
# Tests compile much and compute little.
OPTIONS = {"xla_backend_optimization_level": 0}
LOWMEMBP = ["lowmembp", "lowmembp+remat"]


class Case:
    """A checkpoint of `tests/data/hf_tiny`, and the model that it is for."""

    def __init__(self, name, module, model, config):
        self.module, self.model = module, model
        self.directory = DATA / name
        self.config = config.from_json(self.directory / "config.json")
        self.io = np.load(self.directory / "io.npz")
        self.images = self.io["in.pixel_values"].transpose(0, 2, 3, 1)
        self.tensors = read_tensors(self.directory)
        self.params = self.to_params(self.tensors)
        self.merged = lm.merge_norm_affine(self.params, module.NORM_RULES)

    def abstract(self, compute=Compute()):  # noqa: B008
        images = jax.ShapeDtypeStruct(self.images.shape, jnp.float32)
        model = self.model(self.config, compute)
        return jax.eval_shape(model.init, jax.random.key(0), images)["params"]

    def to_params(self, tensors, **kwargs):
        module = self.module
        return to_params(
            tensors, self.abstract(), module.hugging_face_name, module.UNUSED, **kwargs
        )

    def logits(self, compute, params=None, images=None):
        params = params or (self.merged if compute.merged else self.params)
        model = self.model(self.config, compute)
        apply = jax.jit(model.apply, compiler_options=OPTIONS)
        return apply({"params": params}, self.images if images is None else images)

    @functools.cache  # noqa: B019
    def run(self, compute, gelu=None, **kwargs):
        """Gradients, of logits and a loss that are PyTorch's; `gelu` in place of the model's."""

        def step(params):
            model = self.model(self.config, compute, **kwargs)
            logits = model.apply({"params": params}, self.images)
            labels = self.io["in.labels"].astype(np.int32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, logits

        step = jax.jit(jax.value_and_grad(step, has_aux=True), compiler_options=OPTIONS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module, "gelu", gelu or self.module.gelu)
            (loss, logits), gradients = step(self.merged if compute.merged else self.params)
        np.testing.assert_allclose(logits, self.io["logits"], atol=2e-5)
        np.testing.assert_allclose(loss, self.io["loss"], rtol=1e-5)
        return gradients


def step_gelu(compute, x, *, approximate):
    """GELU whose slope is ReGELU2's, written without the library: forward exact."""
    a1, a2 = -0.04922261145617846, 1.0979632065417297
    c1, c2, c3 = -3.1858810036855245, -0.001178821281161997, 3.190832613414926
    steps = [(c1, a1), (c2, a2), (c3, 1 - a1 - a2)]
    slope = sum(jnp.where(x > c, np.float32(a), np.float32(0)) for c, a in steps)
    stop = jax.lax.stop_gradient
    return stop(jax.nn.gelu(x, approximate)) + stop(slope) * (x - stop(x))


def assert_close(gradients, expected, tolerance=1e-4):
    """Each parameter within `tolerance` of its largest; keys' biases are 0 but for rounding."""

    def check(path, got, want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        atol = 1e-7 if name.endswith(("key/bias", "key.bias")) else tolerance * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=name)

    jax.tree_util.tree_map_with_path(check, gradients, expected)


class ImageClassifierTests:
    case: Case

    @pytest.mark.parametrize("method", EXACT)
    def test_gradients_are_pytorchs(self, method):
        gradients = from_params(self.case.run(Compute(method)), self.case.module.hugging_face_name)
        names = {name for name in self.case.io if name.startswith("grad.")}
        assert {f"grad.{name}" for name in gradients} == names
        assert_close(gradients, {name: self.case.io[f"grad.{name}"] for name in gradients})
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        keys = [g for name, g in gradients.items() if name.endswith("key.bias")]
        assert keys and all(np.abs(key).max() < 1e-6 * largest for key in keys)

    @pytest.mark.parametrize("merged", [False, True])
    @pytest.mark.parametrize("method", LOWMEMBP)
    def test_only_the_slope_of_gelu_is_not_exact(self, method, merged):
        gradients = self.case.run(Compute(method, merged=merged))
        assert_close(gradients, self.case.run(Compute("default", merged=merged), step_gelu))

    def test_norm_residual_output(self):
        normalized = self.case.run(Compute("lowmembp"))
        assert_close(self.case.run(Compute("lowmembp"), norm_residual="output"), normalized)

    def test_merging_makes_the_parameters_of_the_merged_model(self):
        abstract = self.case.abstract(Compute(merged=True))
        assert jax.tree.structure(self.case.merged) == jax.tree.structure(abstract)
        shapes = [[leaf.shape for leaf in jax.tree.leaves(t)] for t in (self.case.merged, abstract)]
        assert shapes[0] == shapes[1]

    @pytest.mark.parametrize("merged", [False, True])
    @pytest.mark.parametrize("method", ["default", "lowmembp"])
    def test_bfloat16(self, method, merged):
        compute = Compute(method, dtype=jnp.bfloat16, merged=merged)
        with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention needs it
            logits = self.case.logits(compute)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, self.case.io["logits"], atol=0.05)

    def test_chunked_attention(self):
        gradients = self.case.run(Compute(attention="chunked"))
        assert_close(gradients, self.case.run(Compute("default")))

    def test_saved_as_it_was(self, tmp_path):
        config = json.loads((self.case.directory / "config.json").read_text())
        write_tensors(tmp_path, self.saved(), config)
        again = read_tensors(tmp_path)
        assert again.keys() == self.case.tensors.keys()
        for name, tensor in self.case.tensors.items():
            assert again[name].dtype == tensor.dtype
            np.testing.assert_array_equal(again[name], tensor, err_msg=name)
        assert type(self.case.config).from_json(tmp_path / "config.json") == self.case.config

    def saved(self):
        return from_params(self.case.params, self.case.module.hugging_face_name)

    def test_config_of_its_own(self, tmp_path):
        for config in (self.case.config, *self.case.module.CONFIGS.values()):
            (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
            assert type(config).from_json(tmp_path / "config.json") == config

    def test_every_problem_is_named(self):
        tensors = dict(self.case.tensors)
        del tensors["classifier.bias"]
        tensors["classifier.scale"] = np.zeros(3, np.float32)
        tensors["classifier.weight"] = tensors["classifier.weight"].T
        with pytest.raises(ValueError) as error:
            self.case.to_params(tensors)
        for problem in (
            "missing classifier.bias",
            "unknown classifier.scale",
            f"classifier.weight has shape {tensors['classifier.weight'].shape}",
        ):
            assert problem in str(error.value)

    def test_encoder_without_a_head(self):
        prefix = self.case.module.PREFIX
        bare = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.case.tensors.items()
            if not name.startswith("classifier")
        }
        with pytest.raises(ValueError, match=r"missing classifier\.bias"):
            self.case.to_params(bare, prefix=prefix)
        head = {"kernel": np.zeros((48, 7), np.float32), "bias": np.zeros(7, np.float32)}
        params = self.case.to_params(bare, prefix=prefix, initial={"classifier": head})
        assert params["classifier"] is head
        rest = {**params, "classifier": self.case.params["classifier"]}
        jax.tree.map(np.testing.assert_array_equal, rest, self.case.params)
