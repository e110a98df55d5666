"""The planner says where whole logits of a vocabulary are at the peak."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.usefixtures("jax_defaults")]
TOKENS, FEATURES, VOCAB = 4096, 512, 32000
NOTE = "write loss = lm.linear_cross_entropy(hidden, kernel, labels)"


def whole(params, hidden, labels):
    logits = (hidden @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def written_out(params, hidden, labels):
    logits = (hidden @ params["head"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def tiled(params, hidden, labels):
    return lm.linear_cross_entropy(hidden, params["head"], labels)


def mlp(params, hidden, _):
    """float32 of the same shape, and no loss of a vocabulary."""
    x = jnp.exp((hidden @ params["head"]).astype(jnp.float32))
    return jnp.square(x / jnp.sum(x, axis=-1, keepdims=True)).mean()


def plan(loss, **options):
    def step(params, hidden, labels):
        return jax.grad(loss)(params, hidden, labels)

    head = jax.ShapeDtypeStruct((FEATURES, VOCAB), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((TOKENS, FEATURES), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return lm.memory.plan(step, {"head": head}, hidden, labels, device="h200", **options)


@pytest.mark.parametrize("loss", [whole, written_out])
def test_whole_logits_are_noted_with_the_line_to_write(loss):
    [note] = plan(loss).notes
    assert "float32 logits of 32,000 words take" in note and NOTE in note
    assert "MiB at the peak" in note and "test_memory_vocabulary.py:" in note


@pytest.mark.parametrize("loss", [tiled, mlp])
def test_no_note_where_there_are_none(loss):
    assert not plan(loss).notes


@pytest.mark.parametrize("shardings", [(P(), P("x")), (P(None, "x"), P())])
def test_logits_that_devices_share(shardings):
    head, rows = shardings
    found = plan(whole, mesh={"x": 4}, in_shardings=({"head": head}, rows, rows))
    assert any(NOTE in note for note in found.notes)
