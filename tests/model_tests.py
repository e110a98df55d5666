"""What every model of examples/models must do, against PyTorch's: tests to inherit from."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import quick_jit
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors

import lowmembp_jax as lm
from lowmembp_jax.models.families import FAMILIES
from lowmembp_jax.models.layers import Compute

DATA = Path(__file__).parent / "data" / "hf_tiny"
EXACT = ["default", "norm+activation", "dots", "products", "full-remat", "offload"]
LOWMEMBP = [
    *("lowmembp", "lowmembp+remat"),
    pytest.param("lowmembp+compress", marks=pytest.mark.slow),
]


class Case:
    """A checkpoint of `tests/data/hf_tiny`, and the model that it is for.

    Args:
      name: of the checkpoint.
      activation: the module and the name of the activation that lowmembp approximates; None where
        all is exact.
      fields: more of the model's.
    """

    def __init__(self, name, activation=None, **fields):
        self.directory = DATA / name
        given = json.loads((self.directory / "config.json").read_text())
        family = FAMILIES[given["model_type"]]
        self.module, self.model, self.fields = family.module, family.model, fields
        self.activation = activation
        self.config = family.config.from_json(self.directory / "config.json")
        self.io = np.load(self.directory / "io.npz")
        self.inputs = self._inputs(family.task)
        self.tensors = read_tensors(self.directory)
        self.params = self.to_params(self.tensors)
        layers = "scan" if fields.get("scan_layers") else None
        self.rules = family.norm_rules(self.config, layers)

    @functools.cached_property
    def merged(self):
        return lm.merge_norm_affine(self.params, self.rules)

    def _inputs(self, task):
        if task == "image-classification":
            return (self.io["in.pixel_values"].transpose(0, 2, 3, 1),)
        ids = self.io["in.input_ids"].astype(np.int32)
        if task == "language-modelling":
            return (ids,)
        types = [self.io[name] for name in self.io if name == "in.token_type_ids"]
        lengths = self.io["in.attention_mask"].sum(1)
        return (ids, *(x.astype(np.int32) for x in (lengths, *types)))

    def abstract(self, compute=Compute()):  # noqa: B008
        model = self.model(self.config, compute, **self.fields)
        return jax.eval_shape(model.init, jax.random.key(0), *self.inputs)["params"]

    def to_params(self, tensors, **kwargs):
        module = self.module
        return to_params(
            tensors, self.abstract(), module.hugging_face_name, module.UNUSED, **kwargs
        )

    def logits(self, compute, params=None, inputs=None):
        params = params or (self.merged if compute.merged else self.params)
        model = self.model(self.config, compute, **self.fields)
        apply = quick_jit(model.apply)
        return apply({"params": params}, *(inputs or self.inputs))

    def loss(self, logits):
        labels = self.io["in.labels"].astype(np.int32)
        if labels.ndim == 2:  # of a text, the next token's
            logits, labels = logits[:, :-1], labels[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.cache  # noqa: B019
    def run(self, compute, activation=None, **kwargs):
        """Gradients, of logits and a loss that are PyTorch's; `activation` in place of its own."""

        def step(params):
            model = self.model(self.config, compute, **self.fields, **kwargs)
            logits = model.apply({"params": params}, *self.inputs)
            return self.loss(logits), logits

        step = quick_jit(jax.value_and_grad(step, has_aux=True))
        with pytest.MonkeyPatch.context() as patch:
            if activation is not None:
                module, name = self.activation
                patch.setattr(module, name, activation)
            (loss, logits), gradients = step(self.merged if compute.merged else self.params)
        np.testing.assert_allclose(logits, self.io["logits"], atol=2e-5)
        np.testing.assert_allclose(loss, self.io["loss"], rtol=1e-5)
        return gradients


def _with_steps(x, function, table):
    """`function` with a slope of steps in the backward, written without the library."""
    rises = zip(table.thresholds, np.diff(table.levels), strict=True)
    slope = table.levels[0] + sum(jnp.where(x > c, np.float32(rise), 0) for c, rise in rises)
    stop = jax.lax.stop_gradient
    return stop(function(x)) + stop(slope) * (x - stop(x))


def step_gelu(compute, x, *, approximate):
    table = lm.STEP_TABLES["gelu_tanh" if approximate else "gelu_erf", 2]
    return _with_steps(x, functools.partial(jax.nn.gelu, approximate=approximate), table)


def assert_close(gradients, expected, tolerance=1e-4):
    """Each parameter within `tolerance` of its largest; keys' biases are 0 but for rounding."""

    def check(path, got, want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        atol = 1e-7 if name.endswith(("key/bias", "key.bias")) else tolerance * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=name)

    jax.tree_util.tree_map_with_path(check, gradients, expected)


def assert_pytorchs(case, gradients):
    """Compares gradients with PyTorch's, and returns them by PyTorch's names."""
    gradients = from_params(gradients, case.module.hugging_face_name)
    assert {f"grad.{name}" for name in gradients} == {n for n in case.io if n.startswith("grad.")}
    assert_close(gradients, {name: case.io[f"grad.{name}"] for name in gradients})
    return gradients


def specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


class ModelTests:
    """What does not depend on the task."""

    case: Case
    activation = staticmethod(step_gelu)

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("method", EXACT)
    def test_gradients_are_pytorchs(self, method):
        gradients = assert_pytorchs(self.case, self.case.run(Compute(method)))
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        keys = [g for name, g in gradients.items() if name.endswith("key.bias")]
        assert all(np.abs(key).max() < 1e-6 * largest for key in keys)

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("merged", [False, True])
    @pytest.mark.parametrize("method", LOWMEMBP)
    def test_only_the_slope_of_the_activation_is_not_exact(self, method, merged):
        # What is compressed has no rounding without a dtype of its own.
        gradients = self.case.run(Compute(method, merged=merged, compress_dtype=None))
        expected = self.case.run(Compute("default", merged=merged), self.activation)
        assert_close(gradients, expected)

    def test_norm_residual_output(self):
        normalized = self.case.run(Compute("lowmembp"))
        assert_close(self.case.run(Compute("lowmembp"), norm_residual="output"), normalized)

    def test_merging_makes_the_parameters_of_the_merged_model(self):
        """From arrays and from shapes."""
        abstract = lm.merge_norm_affine(self.case.abstract(), self.case.rules)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
        made = specs(self.case.abstract(Compute(merged=True)))
        assert specs(self.case.merged) == specs(abstract) == made

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
        given = json.loads((self.case.directory / "config.json").read_text())
        made = json.loads(json.dumps(self.case.config.to_json()))
        assert "model_type" in made
        assert all(made[name] == given[name] for name in made.keys() & given.keys())


class ClassifierTests(ModelTests):
    """What models with a classifier do besides; `head` are its modules."""

    head = ("classifier",)

    def test_encoder_without_a_head(self):
        prefix = self.case.module.PREFIX
        bare = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.case.tensors.items()
            if not name.startswith("classifier")
        }
        with pytest.raises(ValueError, match=r"missing classifier\."):
            self.case.to_params(bare, prefix=prefix)
        head = {"kernel": np.zeros((48, 7), np.float32), "bias": np.zeros(7, np.float32)}
        params = self.case.to_params(bare, prefix=prefix, initial=dict.fromkeys(self.head, head))
        assert all(params[name] is head for name in self.head)
        rest = params | {name: self.case.params[name] for name in self.head}
        jax.tree.map(np.testing.assert_array_equal, rest, self.case.params)
