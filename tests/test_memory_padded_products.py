"""The planner says where XLA pads products to split them."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

plan_module = importlib.import_module("lowmembp_jax.memory.planning")

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.usefixtures("jax_defaults")]


def gradient(p, x):
    """As of a LoRA matrix: few results, as many terms as there are rows."""
    return jax.grad(lambda p: jnp.sum(jnp.square((x @ p).astype(jnp.float32))))(p)


@pytest.mark.parametrize(
    ("rows", "split", "is_padded"),
    [(264 * 198, None, True), (264 * 198, 1, False), (256 * 198, None, False)],
)
def test_rows_that_are_no_multiple_of_the_parts(rows, split, is_padded):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 8), (rows, 1024))]
    options = {} if split is None else {"xla_gpu_experimental_force_split_k": split}
    plan = lm.memory.plan(gradient, *arrays, device="h200", compiler_options=options)
    given = rows * 1024 * 2
    if is_padded:
        [note] = plan.notes
        assert "pads 2 operands" in note and "52,272 rows to 52,480" in note
        assert "103.30 MiB wait" in note
        assert "a multiple of 256 or more" in note and plan.peak > 1.9 * given
        assert "force_split_k=1 the peak is 102.9" in note
    else:
        assert not plan.notes and plan.peak < 1.1 * given


def test_no_option_that_does_not_help(monkeypatch):
    compiled = plan_module._compiled

    def same(step, **options):
        return compiled(step)

    monkeypatch.setattr(plan_module, "_compiled", same)
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 8), (264 * 198, 1024))]
    [note] = lm.memory.plan(gradient, *arrays, device="h200").notes
    assert "pads 2 operands" in note and "split_k" not in note


def test_pads_of_the_model_are_no_concern():
    def step(p, x):
        return gradient(p, jnp.pad(x, ((0, 1024 - x.shape[0]), (0, 0))))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 8), (1000, 1024))]
    assert not lm.memory.plan(step, *arrays, device="h200").notes


def test_the_largest_batch_says_where_it_ends_at_pads():
    def factory(_, batch):
        shapes = ((1024, 8), (198 * batch, 1024))
        return gradient, tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    options = {"budget": "230MB", "find_largest_batch": True, "cache": False, "progress": False}
    found = lm.memory.compare(factory, ["default"], batch=256, device="h200", **options)
    assert not found["default"].plan.notes and 256 < found["default"].largest_batch < 300
    assert any("pads 2 operands" in note for note in found.notes)
