"""The models that `lowmembp plan --model NAME` plans, and their config.json."""

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import integers, normal

import lowmembp_jax as lm
from lowmembp_jax import cli
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.decoder_configs import CONFIGS
from lowmembp_jax.models.workload import MODELS, Batch, make_optimizer, of_config_json, workload

TINY = Path(__file__).parent / "data" / "hf_tiny"
#: As Google published it, without what concerns images and generation alone.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}

pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("vit-ti16", {"tokens": 8}, "tokens: expected None, because vit takes images"),
        ("llama-tiny", {"method": "magic"}, "method: expected one of default, .* got 'magic'"),
        ("llama-tiny", {"dtype": "int8"}, "dtype: expected one of .* got 'int8'"),
        ("swin-t", {"layers": "scan"}, "layers: expected one of unrolled for swin, got 'scan'"),
        ("llama-tiny", {"tiles": 0}, "tiles: expected an integer from 1"),
        ("vit-ti16", {"tiles": 8}, "tiles: expected None, because vit is no decoder"),
        ("llama-tiny", {"update": "backward", "method": "offload"}, "update: .* method 'offload'"),
    ],
)
def test_bad_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        MODELS[model](**options)


def test_compressed_optimizer_state():
    options = {"optimizer_state": "8bit", "master_weights": "24bit"}
    small, large = MODELS["vit-ti16"](**options).args, MODELS["vit-ti16"]().args
    nbytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert nbytes(small[0]) == nbytes(large[0]) / 2 and nbytes(small[1]) < nbytes(large[1]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_an_update_in_the_backward(tied):
    """The same parameters as after a step with all gradients, without clipping."""
    family = FAMILIES["llama"]
    config = dataclasses.replace(family.toy, tie_word_embeddings=tied, num_hidden_layers=2)
    make = partial(workload, family, config, batch=2, tokens=8, dtype="float32", layers="scan")
    work = make(update="backward")
    keys = itertools.count()
    draw = lambda x: 0.1 * normal(*x.shape, key=next(keys), dtype=x.dtype)  # noqa: E731
    stack, first, last = jax.tree.map(draw, work.args[0])
    ids = integers(2, 8, low=0, high=config.vocab_size)
    batch = Batch((ids,), ids)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), work.args[1])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        new, _, loss = jax.jit(work.step)((stack, first, last), zeros, batch)
        params = {"layers": stack, **first, **last}
        value, grads = jax.jit(jax.value_and_grad(make().loss))(params, batch)
        optimizer = make_optimizer(clips=False)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        want = optax.apply_updates(params, updates)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    got = {"layers": new[0], **new[1], **new[2]}
    moved = [jax.tree.map(jnp.subtract, one, params) for one in (got, want)]
    assert lm.gradient_distance(*moved).error < 2e-2  # the sign of a gradient near 0


def test_updates_in_the_backward_are_for_equal_layers():
    for name, options in (("gemma-2-2b", {}), ("llama-tiny", {"layers": "unrolled"})):
        with pytest.raises(ValueError, match=r"update: expected .end., because .* not scanned or"):
            MODELS[name](update="backward", **options)


def written(folder, content):
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", ["llama_rope", "qwen3", "gemma2", "gemma3_text"])
def test_a_model_by_its_config_json(name):
    path = str(TINY / name / "config.json")
    given, (title, make) = json.loads(Path(path).read_text()), of_config_json(path)
    params = make(batch=2, tokens=16).args[0]
    embedding = params["word_embeddings"]["embedding"]
    assert title == path and embedding.shape == (given["vocab_size"], given["hidden_size"])
    assert ("lm_head" in params) == (name == "qwen3")


def test_the_text_model_of_gemma_3(tmp_path):
    path = written(tmp_path, GEMMA_3_4B)
    title, make = of_config_json(path)
    assert title == f"{path} (only text_config)"
    assert make.args[1] == CONFIGS["gemma-3-4b-text"]
    params = jax.tree.leaves(make().args[0])
    assert sum(leaf.size for leaf in params) == 3_880_263_168


def test_a_config_json_of_another_model_is_refused(tmp_path, capsys):
    given = json.loads((TINY / "llama/config.json").read_text())
    path = written(tmp_path, given | {"quantization_config": {}})
    assert cli.main(["plan", "--model", path]) == 2
    message = f"lowmembp: error: --model: {path}: quantization_config: expected no such key"
    assert message in capsys.readouterr().err
