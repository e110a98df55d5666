"""The arguments that `validate_measure.py` makes for a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.benchmarks.validate_arguments import materialize
from lowmembp_examples.benchmarks.validate_configurations import SMOKE
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.data.labelled_text import TextBatch

import lowmembp_jax as lm


def test_arguments_of_a_model():
    work = SMOKE.workload("h200")
    state, frozen, batch = made = materialize(work, 256)
    abstract = jax.eval_shape(lambda args: args, made)
    assert jax.tree.structure(abstract) == jax.tree.structure(work.args)
    for ours, wanted in zip(jax.tree.leaves(abstract), jax.tree.leaves(work.args), strict=True):
        assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
    assert int(state.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    codes = np.asarray(frozen["layers"]["up"]["kernel"].array.qvalue).astype(int)
    assert set(codes.ravel()) == set(range(16))
    head = np.asarray(frozen["lm_head"]["kernel"], np.float32)
    assert 0.015 < head.std() < 0.025
    tokens = np.asarray(batch.tokens)
    assert 0 <= tokens.min() < 30 and 220 < tokens.max() < 256 and np.all(batch.mask)


def arguments_of(batch, params=None):
    def step(state, frozen, batch):
        raise NotImplementedError

    work = lm.memory.Workload(step, ({"params": params or {}}, {}, batch))
    return materialize(work, 1000)


def test_batches_of_texts_and_images():
    array = jax.ShapeDtypeStruct
    rows, mask = array((8,), jnp.int32), array((8,), jnp.bool_)
    *_, text = arguments_of(TextBatch(array((8, 16), jnp.int32), rows, rows, mask))
    assert np.all(np.asarray(text.lengths) == 16) and np.all(text.mask)
    assert set(np.asarray(text.labels)) == {0, 1} and 500 < np.asarray(text.input_ids).max() < 1000
    *_, images = arguments_of(ImageBatch(array((8, 16, 16, 3), jnp.float32), rows, mask))
    assert 0.9 < np.asarray(images.images).std() < 1.1
    state, *_ = arguments_of((), {"norm": {"scale": array((4,), jnp.float32)}})
    assert np.all(np.asarray(state["params"]["norm"]["scale"]) == 1)
    with pytest.raises(ValueError, match=r"batch\['speech'\]: accepted in a batch are images"):
        arguments_of({"speech": rows})
