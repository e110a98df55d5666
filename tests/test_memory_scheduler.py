"""The planner says what XLA's latency-hiding scheduler costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm
from lowmembp_jax.memory.notes import scheduler
from lowmembp_jax.memory.parsing import hlo_text as hlo

PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = f32[8]{0} all-reduce-start(%x)
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}
"""
H100 = lm.memory.get_device("h100")


def notes(without, *, text=PROGRAM, device=H100, options=(), version=(0, 12, 0)):
    """Those of a peak of 1,000 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "__version_info__", version)
        asked = {"peak_with": lambda option, value: without}
        return list(scheduler.scheduler_cost(hlo.parse(text), device, dict(options), 1000, **asked))


@pytest.mark.parametrize(("without", "count"), [(900, 1), (960, 0), (1040, 0), (1200, 1)])
def test_only_differences_that_count(without, count):
    found = notes(without)
    assert len(found) == count
    assert all(f"{scheduler.OPTION}=False" in note and f"{without:,} B" in note for note in found)


def test_where_the_scheduler_is_off_or_has_nothing_to_do():
    assert not notes(500, text=PROGRAM.replace("-start(", "("))
    assert not notes(500, device=dataclasses.replace(H100, capability=(8, 0)))
    assert not notes(500, options={scheduler.OPTION: True})
    assert not notes(500, version=(0, 10, 2))


@pytest.mark.slow
@pytest.mark.gpu_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it has no effect")
def test_a_sharded_step_without_it():
    @jax.checkpoint
    def block(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1]

    def loss(params, x):
        for w in params:
            x = block(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    shapes = (512, 2048), (2048, 512), (4096, 512)
    *weights, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    over = {"mesh": {"data": 8}, "in_shardings": (P("data"), P("data"))}
    over["out_shardings"] = P("data")
    plan = lm.memory.plan(step, [tuple(weights)] * 8, x, device="h100", donate=0, **over)
    assert any(scheduler.OPTION in note for note in plan.notes)
    over["compiler_options"] = {scheduler.OPTION: False}
    other = lm.memory.plan(step, [tuple(weights)] * 8, x, device="h100", donate=0, **over)
    assert other.peak < 0.95 * plan.peak
