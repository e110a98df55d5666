"""Logits and gradients of every family are PyTorch's, with tests/data/hf_tiny's checkpoints."""

import functools
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import assert_equal

import lowmembp_jax as lm
from lowmembp_jax.models import Compute, layers
from lowmembp_jax.models.families import read_config
from lowmembp_jax.models.methods import TABLE

DATA = Path(__file__).parents[1] / "data" / "hf_tiny"
#: These run by default.
NAMES = ["vit", "swin_padded", "bert", "llama_rope", "gemma3_text"]
MORE = ["swin", "roberta", "llama", "llama_gqa", "qwen3", "gemma2"]
#: The activations of the other methods have a step function as their slope.
EXACT = [name for name, method in TABLE.items() if method.operators != "lowmembp"]


class Case:
    """A checkpoint, its inputs, and PyTorch's logits, loss and gradients of them."""

    def __init__(self, name, how=None):
        self.family, self.config = read_config(DATA / name / "config.json")
        self.layers = how or self.family.layers[0]
        self.io = np.load(DATA / name / "io.npz")
        self.labels = self.io["in.labels"].astype(np.int32)
        if self.family.task == "image-classification":
            self.inputs = (self.io["in.pixel_values"].transpose(0, 2, 3, 1),)
        else:
            self.inputs = (self.io["in.input_ids"].astype(np.int32),)
        if self.family.task == "text-classification":
            types = [self.io[key] for key in self.io if key == "in.token_type_ids"]
            more = (self.io["in.attention_mask"].sum(1), *types)
            self.inputs += tuple(x.astype(np.int32) for x in more)
        abstract = jax.eval_shape(self.build(Compute()).init, jax.random.key(0), *self.inputs)
        tensors = checkpoints.read_tensors(DATA / name)
        self.params = checkpoints.to_params(tensors, abstract["params"], self.family)

    def build(self, compute):
        return self.family.build(self.config, compute, self.layers)

    @functools.cached_property
    def merged(self):
        return lm.merge_norm_affine(self.params, self.family.norm_rules(self.config))

    @functools.cache  # noqa: B019
    def gradients(self, compute, slope=None):
        """Checks logits and loss; returns gradients. `slope` replaces the activation."""

        def loss(params):
            logits = self.build(compute).apply({"params": params}, *self.inputs)
            labels, used = self.labels, logits
            if labels.ndim == 2:  # the next token's
                used, labels = logits[:, :-1], labels[:, 1:]
            losses = optax.softmax_cross_entropy_with_integer_labels(used, labels)
            return losses.mean(), logits

        with pytest.MonkeyPatch.context() as patch:
            if slope is not None:
                patch.setattr(layers, "gelu", slope)
            step = jax.jit(jax.value_and_grad(loss, has_aux=True))
            (value, logits), gradients = step(self.merged if compute.merged else self.params)
        exact, is_exact = self.io["logits"], compute.dtype == jnp.float32
        tolerance = 2e-5 if is_exact else 0.03
        if is_exact:
            largest = max(1, np.abs(exact).max())
            np.testing.assert_allclose(logits, exact, rtol=0, atol=tolerance * largest)
        else:  # a single token's logits may be further off
            assert np.linalg.norm(logits - exact) < tolerance * np.linalg.norm(exact)
        np.testing.assert_allclose(value, self.io["loss"], rtol=tolerance)
        return gradients

    def assert_pytorchs(self, gradients):
        got = checkpoints.from_params(gradients, self.family)
        expected = {n.removeprefix("grad."): self.io[n] for n in self.io if n.startswith("grad.")}
        assert got.keys() == expected.keys()
        assert_close(got, expected)


case = functools.cache(Case)


def assert_close(gradients, expected, tolerance=1e-4):
    """Each is within `tolerance` of its largest. Only rounding moves keys' biases from 0."""

    def check(path, got, want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        atol = 1e-7 if name.endswith(("key/bias", "key.bias")) else tolerance * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=name)

    jax.tree_util.tree_map_with_path(check, gradients, expected)


def step_gelu(compute, x, *, approximate):
    """GELU with a slope of steps in the backward, written without the library."""
    table = lm.STEP_TABLES["gelu_tanh" if approximate else "gelu_erf", 2]
    rises = zip(table.thresholds, np.diff(table.levels), strict=True)
    slope = table.levels[0] + sum(jnp.where(x > c, np.float32(rise), 0) for c, rise in rises)
    stop, value = jax.lax.stop_gradient, jax.nn.gelu(x, approximate)
    return stop(value) + stop(slope) * (x - stop(x))


def slow(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *[(name, None) for name in NAMES],
        *slow(*[(name, None) for name in MORE]),
        *slow(*[(name, "scan") for name in ("vit", "bert", "roberta")]),
        *slow(*[(name, "unrolled") for name in ("llama", "llama_gqa", "gemma3_text")]),
    ],
)
def test_gradients(name, layers):
    one = case(name, layers)
    one.assert_pytorchs(one.gradients(Compute()))


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama_rope", "compress+remat"), *slow(*[("bert", name) for name in EXACT])],
)
def test_methods(name, method):
    """Without a dtype, lm.compress rounds nothing."""
    case(name).assert_pytorchs(case(name).gradients(Compute(method, compress_dtype=None)))


@pytest.mark.parametrize(
    ("name", "method", "merged"),
    [
        ("vit", "lowmembp", True),
        *slow(("bert", "lowmembp+remat", False)),
        *slow(*[(name, "lowmembp", False) for name in ("swin_padded", "roberta", "llama")]),
    ],
)
def test_only_the_slope_of_the_activation_is_not_exact(name, method, merged):
    one = case(name)
    gradients = one.gradients(Compute(method, merged=merged, compress_dtype=None))
    slope = None if name == "llama" else step_gelu
    assert_close(gradients, one.gradients(Compute(merged=merged), slope))


@pytest.mark.parametrize("name", ["vit", *slow(("swin_padded",), ("llama",), ("llama_gqa",))])
def test_merged(name):
    """Parameters that merging leaves alone have the same gradients."""
    one = case(name)
    got, expected = one.gradients(Compute(merged=True)), one.gradients(Compute())
    got, expected, merged, plain = map(flatten_dict, (got, expected, one.merged, one.params))
    # The padding of a merged Swin reads the norms that are kept.
    same = [at for at in got if merged[at] is plain.get(at) and "norm1" not in at]
    assert len(same) >= 3
    for at in same:
        assert_close({at[-1]: got[at]}, {at[-1]: expected[at]}, 2e-4)
    abstract = jax.eval_shape(one.build(Compute(merged=True)).init, jax.random.key(0), *one.inputs)
    specs = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert specs(one.merged) == specs(abstract["params"])


@pytest.mark.parametrize("name", ["bert", "roberta", "gemma2"])
def test_nothing_to_merge(name):
    one = case(name)
    assert_equal(one.merged, one.params)
    assert not one.family.norm_rules(one.config)
