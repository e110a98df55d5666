"""Comparisons of methods, and the cache of plans."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.memory import cache as plan_cache
from lowmembp_jax.memory import comparison as comparison_module
from lowmembp_jax.memory.report import comparison_report
from lowmembp_jax.memory.sizes import format_bytes, parse_bytes

WIDTH = 64
ACTIVATIONS = {"default": jax.nn.gelu, "lowmembp": lm.regelu2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def factory(method, batch):
    """Two layers; a plain pair of step and arguments."""

    def step(params, x):
        def loss(params):
            h = x
            for weight in params:
                h = ACTIVATIONS[method](h @ weight)
            return h.astype(jnp.float32).sum()

        return jax.grad(loss)(params)

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    return step, ([weight] * 2, jax.ShapeDtypeStruct((batch, WIDTH), jnp.bfloat16))


@pytest.fixture
def compiled(monkeypatch):
    """How many programs were compiled."""
    count = []
    original = comparison_module.plan_lowered

    def counted(step):
        count.append(step)
        return original(step)

    monkeypatch.setattr(comparison_module, "plan_lowered", counted)
    monkeypatch.setattr(plan_cache, "plan_lowered", counted)
    return count


@pytest.mark.gpu_compiler
def test_rows_cache_and_report(compiled, capsys, monkeypatch):
    methods = ["lowmembp", "default"]
    monkeypatch.setitem(sys.modules, "tqdm", None)  # no dependency
    comparison = lm.memory.compare(factory, methods, batch=65536, device="h100")
    assert (
        capsys.readouterr().err == "planning lowmembp, batch 65536\nplanning default, batch 65536\n"
    )
    assert [one.method for one in comparison] == methods
    assert comparison.batch == 65536
    assert comparison.budget == lm.memory.get_device("h100").usable_bytes()
    assert comparison["lowmembp"].plan.peak < comparison["default"].plan.peak
    assert comparison["default"].largest_batch is None
    assert len(compiled) == 2

    again = lm.memory.compare(factory, methods, batch=65536, device="h100", progress=False)
    assert len(compiled) == 2
    assert again == comparison
    assert json.loads(json.dumps(again.to_dict())) == json.loads(json.dumps(comparison.to_dict()))

    # Another device or program is another plan.
    lm.memory.compare(factory, ["default"], batch=65536, device="a6000", progress=False)
    lm.memory.compare(factory, ["default"], batch=1024, device="h100", progress=False)
    lm.memory.compare(factory, ["default"], batch=1024, device="h100", cache=False, progress=False)
    assert len(compiled) == 5

    from rich.console import Console

    with (console := Console(width=200)).capture() as captured:
        console.print(comparison_report(comparison, "two layers"))
    for one in comparison:
        assert format_bytes(one.plan.peak) in captured.get()
    assert "estimate" in captured.get()


@pytest.mark.gpu_compiler
def test_files_of_the_cache_that_are_no_plans(compiled):
    def run():
        return lm.memory.compare(factory, ["default"], batch=8, progress=False)

    made = run()
    (file,) = lm.memory.plan_cache_directory().glob("*.json")
    whole = file.read_text()
    for damaged in (whole[:100], "{}", "[]"):
        file.write_text(damaged)
        assert run() == made
    count = len(compiled)
    assert count == 4
    assert run() == made and len(compiled) == count
    file.unlink()
    file.mkdir()  # nothing can be written there
    assert run() == made


@pytest.mark.gpu_compiler
def test_what_a_workload_donates_is_not_there_twice():
    def factory(method, batch):
        state = jax.ShapeDtypeStruct((2**20,), jnp.float32)
        donated = (0,) if method == "donated" else ()
        return lm.memory.Workload(lambda state: state * 2, (state,), donate_argnums=donated)

    compared = lm.memory.compare(factory, ["donated", "kept"], cache=False, progress=False)
    assert compared["kept"].plan.peak - compared["donated"].plan.peak == 4 * 2**20


def one_of_two(method, batch):
    return {"default": factory, "own": factory}[method]("default", 8)


def test_a_factory_that_knows_some_methods():
    with pytest.raises(ValueError, match="method: step_factory"):
        lm.memory.compare(one_of_two, batch=8)

    def other_key(method, batch):
        return {}["model"]

    with pytest.raises(KeyError, match="model"):
        lm.memory.compare(other_key, batch=8)


@pytest.mark.gpu_compiler
def test_a_factory_that_says_its_methods(monkeypatch):
    monkeypatch.setattr(one_of_two, "methods", ("default", "own"), raising=False)
    compared = lm.memory.compare(one_of_two, batch=8, cache=False, progress=False)
    assert [one.method for one in compared] == ["default", "own"]


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_largest_batch_over_a_mesh():
    def sharded(method, batch):
        step, args = factory(method, batch)
        spec = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
        return lm.memory.Workload(step, args, in_shardings=spec)

    # Padded operands would make the peak fall at round batches.
    options = {"mesh": {"data": 8}, "compiler_options": {"xla_gpu_experimental_force_split_k": 1}}
    comparison = lm.memory.compare(
        sharded, ["default"], batch=8192, budget=5 * 2**20, find_largest_batch=True,
        batch_multiple=8, progress=False, **options,
    )  # fmt: skip
    one = comparison["default"]
    assert one.plan.device_count == 8
    assert one.largest_batch % 8 == 0
    assert one.largest_plan.peak <= 5 * 2**20
    # After 8 plans it is the largest to a percent.
    above = factory("default", one.largest_batch + one.largest_batch // 800 * 8)
    specs = sharded("default", 8).in_shardings
    plan = lm.memory.plan(above[0], *above[1], in_shardings=specs, **options)
    assert plan.peak > 5 * 2**20


@pytest.mark.gpu_compiler
def test_tracing_sees_the_callers_contexts():
    def mixed(method, batch):
        args = jax.ShapeDtypeStruct((batch,), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
        return lambda x, y: x + y, args

    with pytest.raises(jax.dtypes.TypePromotionError):
        lm.memory.compare(mixed, ["default"], batch=8, progress=False)
    with jax.numpy_dtype_promotion("standard"):
        lm.memory.compare(mixed, ["default"], batch=8, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": []}, "methods must be a sequence of names"),
        ({"methods": "compress"}, "methods must be a sequence of names, got 'compress'"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": None, "find_largest_batch": True}, "needs a batch to start from"),
        ({"batch_multiple": 0}, "batch_multiple must be at least 1, got 0"),
        ({"step_factory": lambda method, batch: None}, "must return a lm.memory.Workload"),
    ],
)
def test_errors(arguments, message):
    given = {"step_factory": factory, "methods": ["default"], "batch": 8} | arguments
    with pytest.raises(ValueError, match=message):
        lm.memory.compare(**given)


def test_sizes():
    assert parse_bytes("24GB") == 24 * 10**9
    assert parse_bytes("22.5 GiB") == 22.5 * 2**30
    assert parse_bytes("1000B") == 1000
    assert parse_bytes("3kb") == 3000
    assert format_bytes(3 * 2**30 // 2) == "1.50 GiB"
    assert format_bytes(2**20) == "1.00 MiB"
    assert format_bytes(1023) == "1,023 B"
    for text in ("", "GB", "-1GB", "3 apples", "1e9", "24"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)


def test_a_factory_that_is_none():
    with pytest.raises(TypeError, match="step_factory must be callable, got 3"):
        lm.memory.choose(3)  # pyright: ignore[reportArgumentType]
