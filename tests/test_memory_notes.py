"""What a plan notes of XLA's work on a step, and warns of where that is not the training's."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm
from lowmembp_jax.memory.notes import scheduler
from lowmembp_jax.memory.parsing import hlo_text as hlo

pytestmark = pytest.mark.usefixtures("jax_defaults")
gpu_compiler = pytest.mark.gpu_compiler

H100 = lm.memory.get_device("h100")
ADAM = optax.adam(1e-3)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def step_of(loss):
    return lambda p, *batch: jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, *batch))


@gpu_compiler
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


def lora(p, x):
    """The gradient of a LoRA matrix: few results, as many terms as there are rows."""
    return jax.grad(lambda p: jnp.sum(jnp.square((x @ p).astype(jnp.float32))))(p)


def lora_arrays(rows):
    return array(1024, 8, dtype=jnp.bfloat16), array(rows, 1024, dtype=jnp.bfloat16)


@gpu_compiler
@pytest.mark.parametrize(
    ("rows", "split", "is_padded"),
    [(264 * 198, None, True), (264 * 198, 1, False), (256 * 198, None, False)],
)
def test_products_that_xla_pads_to_split_them(rows, split, is_padded):
    options = {} if split is None else {"xla_gpu_experimental_force_split_k": split}
    plan = lm.memory.plan(lora, *lora_arrays(rows), compiler_options=options)
    given = rows * 1024 * 2
    if is_padded:
        [note] = plan.notes
        assert "pads 2 operands" in note and "52,272 rows to 52,480" in note
        assert "103.30 MiB wait" in note
        assert "a multiple of 256 or more" in note and plan.peak > 1.9 * given
        assert "force_split_k=1 the peak is 102.9" in note
    else:
        assert not plan.notes and plan.peak < 1.1 * given


@gpu_compiler
def test_pads_without_a_remedy_and_pads_of_the_model(monkeypatch):
    planning = importlib.import_module("lowmembp_jax.memory.planning")
    compiled = planning._compiled
    with monkeypatch.context() as patch:  # the option does not help
        patch.setattr(planning, "_compiled", lambda step, **options: compiled(step))
        [note] = lm.memory.plan(lora, *lora_arrays(264 * 198)).notes
    assert "pads 2 operands" in note and "split_k" not in note
    padded = lambda p, x: lora(p, jnp.pad(x, ((0, 24), (0, 0))))  # noqa: E731
    assert not lm.memory.plan(padded, *lora_arrays(1000)).notes


@gpu_compiler
def test_the_largest_batch_says_where_it_ends_at_pads():
    options = {"budget": "230MB", "find_largest_batch": True, "cache": False, "progress": False}
    factory = lambda _, batch: (lora, lora_arrays(198 * batch))  # noqa: E731
    found = lm.memory.compare(factory, ["default"], batch=256, **options)
    assert not found["default"].plan.notes and 256 < found["default"].largest_batch < 300
    assert any("pads 2 operands" in note for note in found.notes)


@jax.checkpoint
def block(w, x):
    def body(h, row):
        h = jnp.tanh(h @ w + row)
        return h, h

    return x + jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1]


def unrolled(params, x):
    for w in params:
        x = block(w, x)
    return jnp.mean(x**2)


def scanned(stacked, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, stacked)[0] ** 2)


@gpu_compiler
def test_stacks_of_unrolled_blocks_that_are_there_at_once():
    arguments, x = [array(64, 64)] * 4, array(32, 16, 64)
    plan = lm.memory.plan(step_of(unrolled), arguments, x, donate=0)
    [note] = plan.notes
    assert "priority-fusion" in note and "at once" in note
    option = {"xla_disable_hlo_passes": "priority-fusion"}
    other = lm.memory.plan(step_of(unrolled), arguments, x, donate=0, compiler_options=option)
    assert other.peak < 0.95 * plan.peak and not other.notes
    assert not lm.memory.plan(step_of(scanned), array(4, 64, 64), x, donate=0).notes


PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = f32[8]{0} all-reduce-start(%x)
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}
"""


@pytest.mark.parametrize(
    ("without", "changed", "count"),
    [
        (900, {}, 1),
        (1200, {}, 1),
        (960, {}, 0),
        (1040, {}, 0),
        (500, {"text": PROGRAM.replace("-start(", "(")}, 0),
        (500, {"device": dataclasses.replace(H100, capability=(8, 0))}, 0),
        (500, {"options": {scheduler.OPTION: True}}, 0),
        (500, {"version": (0, 10, 2)}, 0),
    ],
)
def test_cost_of_the_scheduler_if_it_runs_and_matters(without, changed, count, monkeypatch):
    """The peak is 1,000 bytes; older versions of JAX do not run the scheduler."""
    given = {"text": PROGRAM, "device": H100, "options": {}, "version": (0, 12, 0)} | changed
    monkeypatch.setattr(jax, "__version_info__", given["version"])
    program = hlo.parse(given["text"]), given["device"], given["options"]
    found = list(scheduler.scheduler_cost(*program, 1000, peak_with=lambda *_: without))
    assert len(found) == count
    assert all(f"{scheduler.OPTION}=False" in note and f"{without:,} B" in note for note in found)


@pytest.mark.slow
@gpu_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the option has no effect")
def test_a_sharded_step_without_the_scheduler():
    @jax.checkpoint
    def block(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1]

    def loss(params, x):
        for w in params:
            x = block(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = (512, 2048), (2048, 512), (4096, 512)
    *weights, x = (array(*shape, dtype=jnp.bfloat16) for shape in shapes)
    over = {"mesh": {"data": 8}, "in_shardings": (P("data"), P("data")), "donate": 0}
    over |= {"out_shardings": P("data"), "device": "h100"}
    plan = lm.memory.plan(step_of(loss), [tuple(weights)] * 8, x, **over)
    assert any(scheduler.OPTION in note for note in plan.notes)
    over["compiler_options"] = {scheduler.OPTION: False}
    other = lm.memory.plan(step_of(loss), [tuple(weights)] * 8, x, **over)
    assert other.peak < 0.95 * plan.peak


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


@gpu_compiler
@pytest.mark.parametrize(
    ("loss", "shardings", "is_noted"),
    [
        (whole, None, True),
        (written_out, None, True),
        (whole, (P(), P("x")), True),
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


@gpu_compiler
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (step, (W, STATE, X), None),
        (jax.grad(loss), (W, X), None),
        (loss, (W, X), None),
        (unnamed, (W, X), None),
        (frozen_base, ([W], W, X), None),
        (dropped, (W, STATE, X), "no result depends on the gradients, so XLA drops the back"),
        (lambda params, x: unnamed(params, x).sum(), (W, X), "neither gradients nor new param"),
        (lambda *args: step(*args)[1], (W, STATE, X), "name the argument `params`, or pass `pa"),
        (lambda params, opt_state, x: step(params, opt_state, x)[1], (W, STATE, X), "neither gra"),
    ],
    ids=[
        *("a step", "gradients", "a loss", "a name of one's own", "frozen base"),
        *("dropped", "a number", "no names", "optimizer state alone"),
    ],
)
def test_work_that_xla_drops_has_a_warning(jit, function, args, message):
    if message is None:
        lm.memory.estimate(jit(function), *args)
    else:
        with pytest.warns(UserWarning, match=f"plan: .*{message}"):
            lm.memory.estimate(jit(function), *args)


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
