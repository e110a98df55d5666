"""The notes and the warnings of a plan."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import array
from jax import P

import lowmembp_jax as lm
from lowmembp_jax.memory.whole_models import one_checkpoint

pytestmark = pytest.mark.usefixtures("jax_defaults")

ADAM = optax.adam(1e-3)


@pytest.mark.compiled
@pytest.mark.parametrize("is_stored", [False, True])
def test_optimizer_state_that_8_bits_could_store(is_stored):
    optimizer = lm.compress_state(ADAM) if is_stored else ADAM
    params = {"kernel": array(1024, 1024)}

    def step(params, state, x):
        grads = jax.grad(lambda params: jnp.square(x @ params["kernel"]).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    plan = lm.memory.plan(step, params, state, array(8, 1024), donate=(0, 1))
    assert any("compress_state" in note for note in plan.notes) != is_stored
    assert plan.optimizer_state >= (2 if is_stored else 8) * 1024**2


def logits(params, hidden):
    return (hidden @ params["head"]).astype(jnp.float32)


def whole(params, hidden, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(logits(params, hidden), labels).mean()


def written_out(params, hidden, labels):
    log_probabilities = jax.nn.log_softmax(logits(params, hidden))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


def tiled(params, hidden, labels):
    return lm.linear_cross_entropy(hidden, params["head"], labels)


def no_loss(params, hidden, _):
    """float32 of the same shape, and no loss of a vocabulary."""
    x = jnp.exp(logits(params, hidden))
    return jnp.square(x / jnp.sum(x, axis=-1, keepdims=True)).mean()


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("loss", "shardings", "is_noted"),
    [
        (whole, None, True),
        (written_out, None, True),
        (whole, (P(None, "x"), P()), True),
        (tiled, None, False),
        (no_loss, None, False),
    ],
)
def test_whole_logits_are_noted_with_the_line_to_write(loss, shardings, is_noted):
    head, hidden = array(512, 32000, dtype=jnp.bfloat16), array(4096, 512, dtype=jnp.bfloat16)
    options = {}
    if shardings is not None:
        of_head, rows = shardings
        options = {"mesh": {"x": 4}, "in_shardings": ({"head": of_head}, rows, rows)}
    labels = array(4096, dtype=jnp.int32)
    notes = lm.memory.plan(jax.grad(loss), {"head": head}, hidden, labels, **options).notes
    call = "write loss = lm.linear_cross_entropy(hidden, kernel, labels)"
    found = [note for note in notes if call in note]
    assert len(found) == is_noted
    if shardings is None:
        assert list(notes) == found
        assert all("float32 logits of 32,000 words take" in note for note in found)
        assert all("MiB at the peak" in note and "test_memory_notes.py:" in note for note in found)


W, X = array(8, 8), array(4, 8)
STATE = jax.eval_shape(ADAM.init, W)


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params) ** 2)


def step(params, state, x):
    updates, state = ADAM.update(jax.grad(loss)(params, x), state)
    return params + updates, state


def unnamed(weight_of_mine, x):
    return jax.grad(loss)(weight_of_mine, x)


def dropped(params, state, x):
    step(params, state, x)
    return loss(params, x), params


def frozen_base(params, frozen, x):
    return jax.grad(lambda p: loss(p[0] @ frozen, x))(params)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (step, (W, STATE, X), None),
        (loss, (W, X), None),
        (unnamed, (W, X), None),
        (frozen_base, ([W], W, X), None),
        (dropped, (W, STATE, X), "no result depends on the gradients, so XLA drops the back"),
        (lambda params, x: unnamed(params, x).sum(), (W, X), "neither gradients nor new param"),
        (lambda *args: step(*args)[1], (W, STATE, X), "name one `params`, or pass `parts`"),
        (lambda params, opt_state, x: step(params, opt_state, x)[1], (W, STATE, X), "neither gra"),
    ],
    ids=[
        *("a step", "a loss", "a name of one's own", "frozen base"),
        *("dropped", "a number", "no names", "optimizer state alone"),
    ],
)
def test_work_that_xla_drops_has_a_warning(function, args, message):
    if message is None:
        lm.memory.plan(jax.jit(function), *args)
    else:
        with pytest.warns(UserWarning, match=f"plan: .*{message}"):
            lm.memory.plan(function, *args)


def test_residuals_ask_for_the_loss():
    def penalty(params, x):
        return loss(params, x) + jnp.sum(jax.grad(loss)(params, x) ** 2)

    def compressed(params, x):
        block = lm.compress(lambda params, x: jnp.tanh(x @ params) ** 2)
        return jax.grad(lambda params: block(params, x).sum())(params)

    steps = [(f, (W, STATE, X)) for f in (step, jax.jit(step), dropped)]
    # Approximate operators say no word of second derivatives, which they do not have.
    for function, args in (*steps, (jax.grad(loss), (W, X)), (compressed, (W, array(512, 8)))):
        with pytest.raises(ValueError, match=r"computes gradients itself.* give the loss"):
            lm.memory.residuals(function, *args)
    assert lm.memory.saved_bytes(penalty, W, X) > lm.memory.saved_bytes(loss, W, X)


def layer(w, x):
    q, k, v = (x @ w[name] for name in ("q", "k", "v"))
    return x + jax.nn.softmax(q @ k.T) @ v


def layers(ws, x, wrap=lambda block: block):
    for w in ws:
        x = wrap(layer)(w, x)
    return x


def scanned(ws, x, wrap=lambda block: block):
    stack = jax.tree.map(lambda *each: jnp.stack(each), *ws)
    return jax.lax.scan(lambda x, w: (wrap(layer)(w, x), None), x, stack)[0]


def halves(ws, x):
    return jax.checkpoint(layers)(ws[2:], jax.checkpoint(layers)(ws[:2], x))


WRAPS, MODELS = (lm.compress, jax.checkpoint), (layers, scanned)


@pytest.mark.parametrize(
    ("model", "is_told"),
    [
        *[(wrap(model), True) for wrap in WRAPS for model in MODELS],
        *[(partial(model, wrap=wrap), False) for wrap in WRAPS for model in MODELS],
        (lambda ws, x: lm.compress(layer)(ws[0], x), False),  # products beside each other
        (jax.checkpoint(partial(layers, wrap=jax.checkpoint)), False),
        (halves, False),  # the user's choice
        (layers, False),
    ],
)
def test_one_checkpoint_around_all_layers(model, is_told):
    def step(ws, x):
        return jax.grad(lambda ws: jnp.sum(model(ws, x) ** 2))(ws)

    ws = [{name: array(8, 8) for name in ("q", "k", "v")} for _ in range(4)]
    notes = list(one_checkpoint(jax.make_jaxpr(step)(ws, array(16, 8)).jaxpr))
    assert len(notes) == is_told
    assert all("test_memory_notes.py" in note and "wrap each block" in note for note in notes)


@pytest.mark.compiled
def test_blocks_take_less_than_one_checkpoint_around_them():
    def plan(model):
        ws = [{name: array(256, 256) for name in ("q", "k", "v")} for _ in range(4)]
        step = jax.grad(lambda ws, x: jnp.sum(model(ws, x) ** 2))
        return lm.memory.plan(step, ws, array(512, 256))

    whole, blocks = plan(lm.compress(scanned)), plan(partial(scanned, wrap=lm.compress))
    assert any("holds layers that follow each other" in note for note in whole.notes)
    assert not blocks.notes and blocks.peak < whole.peak
