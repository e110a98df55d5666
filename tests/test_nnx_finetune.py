"""examples/nnx_finetune.py, and its model."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowmembp_examples import finetune, nnx_finetune
from lowmembp_examples.data.labelled_text import TextBatch
from lowmembp_examples.models import bert
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.nnx_bert import load
from tiny_models import TINY, inputs, small_bert

import lowmembp_jax as lm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("jax_defaults")]
CONFIG = TINY["bert"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs it in this process: exit status, results.json, and what it printed."""

    def run(*arguments):
        arguments = ("nnx_finetune.py", "--output", tmp_path / "out", *arguments)
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
        status = finetune.main(nnx_finetune.Config, nnx_finetune.run)
        path = tmp_path / "out" / "results.json"
        results = json.loads(path.read_text()) if path.exists() else None
        return status, results, "".join(capsys.readouterr())

    return run


LINEN = bert.BertClassifier(CONFIG, Compute(), "output", pooling="mean")


@pytest.fixture(scope="module")
def params():
    init = jax.jit(LINEN.init)(jax.random.key(0), *inputs("bert"))["params"]
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(init))))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), init)


@pytest.fixture(scope="module")
def of_linen(params):
    """A batch, its loss and the gradients of all parameters by Flax linen."""
    ids, lengths = inputs("bert", batch=4)
    batch = TextBatch(ids, lengths, jnp.arange(4) % 2, jnp.arange(4) < 3)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss = finetune.make_loss("text-classification", LINEN)
        (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, {}, batch)
    return batch, value, nnx.to_pure_dict(nnx.state(load(CONFIG, Compute(), grads)))


@pytest.mark.parametrize(
    ("method", "error"),
    [
        pytest.param("default", 1e-5, marks=pytest.mark.slow),
        pytest.param("compress", 0.05, marks=pytest.mark.slow),
        ("lowmembp", 0.2),
    ],
)
def test_the_model_is_that_of_linen(params, of_linen, method, error):
    batch, want, exact = of_linen
    model = load(CONFIG, Compute(method), params)
    gradient = nnx.jit(nnx.value_and_grad(nnx_finetune.mean_loss, has_aux=True))
    (loss, totals), grads = gradient(model, batch)
    assert totals.count == 3
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    distance = lm.gradient_distance(nnx.to_pure_dict(grads), exact)
    assert distance.error < error
    assert method == "default" or distance.error > 1e-4


def test_load_names_what_does_not_fit(params):
    with pytest.raises(ValueError, match=r"params: .* missing .*'bert/layers/1/value/kernel'"):
        missing = {k: v for k, v in params["bert"].items() if k != "layer_1"}
        load(CONFIG, Compute(), params | {"bert": missing})
    wide = params | {"classifier": {"kernel": jnp.ones((64, 9)), "bias": jnp.ones(9)}}
    with pytest.raises(ValueError, match=r"params: .* got classifier/bias of shape \(9,\)"):
        load(CONFIG, Compute(), wide)


def test_memory_of_the_methods():
    size = {"batch": 64, "tokens": 32, "dtype": "bfloat16"}
    config = nnx_finetune.Config()
    kept = {}
    for name in nnx_finetune.METHODS:
        work = nnx_finetune.work_of(CONFIG, config, size, "t4", name)
        kept[name] = lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=0)
    plain, compressed, ours = kept.values()
    assert compressed < 0.4 * plain and ours < 0.5 * plain


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_the_step_is_planned():
    size = {"batch": 64, "tokens": 32, "dtype": "float32"}
    work = nnx_finetune.work_of(CONFIG, nnx_finetune.Config(), size, "t4", "plain Flax NNX")
    plan = lm.memory.plan(work.step, *work.args, device="t4")
    weights = sum(x.size * 4 for x in jax.tree.leaves(nnx.state(work.args[0])))
    assert plan.parameters == pytest.approx(weights, rel=0.02)
    assert plan.optimizer_state == pytest.approx(2 * weights, rel=0.02)
    assert plan.outputs < 0.1 * weights  # donated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint-every", 0), "--checkpoint-every: expected at least 1, got 0"),
        (("--batch-size", 9), "batch_size: expected at most 8, the number of training examples"),
    ],
)
def test_bad_arguments_are_named(small, command, arguments, message):
    status, results, printed = command(*small, *arguments)
    assert (status, results) == (2, None)
    assert message in printed


@pytest.mark.slow
def test_runs_end_to_end_and_resumes(small, command, monkeypatch, tmp_path):
    options = (*small, "--steps", 3, "--checkpoint-every", 2, "--no-plan")
    status, results, printed = command(*options)
    assert status == 0, printed
    assert results["classes"] == ["bad", "good"]
    plain, *others = (runs[0]["train_losses"] for runs in results["runs"].values())
    assert len(plain) == 3
    assert all(plain[0] == pytest.approx(each[0], abs=1e-5) and plain != each for each in others)
    assert all(name in printed for name in nnx_finetune.METHODS)
    assert command(*options)[0] == 2  # there is a run

    # As if it had been stopped before the last step.
    shutil.rmtree(tmp_path / "out" / "default-0" / "checkpoints" / "3")
    first = results["runs"]["plain Flax NNX"][0]
    monkeypatch.setattr(nnx_finetune, "METHODS", {"plain Flax NNX": "default"})
    status, results, printed = command(*options, "--resume")
    assert status == 0, printed
    ((again,),) = results["runs"].values()
    assert again["from_step"] == 2
    for name in ("train_losses", "loss", "accuracy"):
        assert again[name] == first[name]
    status, _, printed = command(*options, "--resume", "--learning-rate", 1e-3)
    assert status == 2 and "another learning_rate: 0.0002, now 0.001" in printed
