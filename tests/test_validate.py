"""Which steps examples/benchmarks/validate.py measures, and the arguments that it makes."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples import planning
from lowmembp_examples.benchmarks import validate
from lowmembp_examples.benchmarks.validate import (
    SMOKE_ATTENTION,
    SMOKE_CELL,
    cells,
    device_of,
    materialize,
)
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.data.labelled_text import TextBatch
from lowmembp_examples.lora import Train

import lowmembp_jax as lm

pytestmark = pytest.mark.slow


def test_gpus_by_the_names_of_their_driver():
    assert set(validate._GPUS) == set(lm.memory.DEVICES)
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": "h200-nvl",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx6000pro",
    }
    assert {name: device_of(name) for name in names} == names


@pytest.mark.parametrize("other", ["NVIDIA H100 PCIe", "NVIDIA L40S", "NVIDIA GeForce RTX 4090 D"])
def test_gpus_that_the_planner_does_not_know(other):
    with pytest.raises(ValueError, match=rf"gpu: .* h200.*, got '{other}'"):
        device_of(other)


def test_cells():
    found = cells("h200")
    names = [c.name for c in found]
    assert len(set(names)) == len(names) >= 12
    for one in found:
        assert one.model in planning.MODELS and one.method in lm.memory.METHODS
        assert one.train in get_args(Train)
    assert {c.method for c in found if c.group == "vit-b16/full"} == set(lm.memory.METHODS)


def test_arguments_of_a_model():
    work = SMOKE_CELL.workload(attention=SMOKE_ATTENTION)
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
    with pytest.raises(ValueError, match=r"batch: .*, got batch\['speech'\]"):
        arguments_of({"speech": rows})
