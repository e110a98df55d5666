"""Comparisons of methods: the fastest that fits, the largest batch, and the cache of plans."""

import dataclasses
import random
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.memory import cache as plan_cache
from lowmembp_jax.memory import comparison as comparison_module
from lowmembp_jax.memory.largest_batch import largest_batch
from lowmembp_jax.memory.plot import plot_comparison
from lowmembp_jax.memory.roofline.totals import Cost, Kernel
from lowmembp_jax.models.methods import HOW, TABLE

KERNEL = Kernel("k", "fusion", "", "", "other", 1, 1, 0, 0, "", 1, 0.0)
#: GiB at the peak, and milliseconds.
METHODS = {"default": (30, 10), "dots": (20, 12), "lowmembp": (22, 11), "full-remat": (5, 20)}
METHODS["worse"] = 31, 13
QUIET = {"cache": False, "progress": False}


@pytest.fixture
def planned(monkeypatch):
    """Plans of known peaks and times, without a compiler."""

    def planned(step):
        gib, milliseconds = METHODS[step]
        kernel = dataclasses.replace(KERNEL, estimated_seconds=milliseconds / 1e3)
        notes = ("another",) if step == "dots" else ()
        given = lm.memory.get_device("h200"), 1, 0.75, gib * 2**30, *[0] * 8
        cost = Cost((kernel,), ("a note",))
        return lm.memory.Plan(*given, live=(), cost=cost, notes=notes)

    monkeypatch.setattr(comparison_module, "plan_lowered", planned)
    monkeypatch.setattr(comparison_module, "lower_step", lambda step, *_, **__: step())


def named(method, batch):
    """A step that `planned` knows."""
    return (lambda: method), ()


def choose(budget, *methods):
    methods = methods or ("default", "dots", "lowmembp", "full-remat")
    return lm.memory.choose(named, methods, budget=budget, batch=8, **QUIET)


# dots is exact and takes 9% longer than lowmembp, and full-remat takes 82% longer.
@pytest.mark.parametrize(
    ("budget", "method"),
    [
        *[(None, "default"), ("30GiB", "default"), ("22.5 GiB", "dots"), (20 * 2**30, "dots")],
        ("6GiB", "full-remat"),
    ],
)
def test_the_fastest_exact_method_that_fits(planned, budget, method):
    choice = choose(budget)
    assert choice.method == method
    assert choice.plan.fits
    assert choice.how == HOW[method] and choice.how in str(choice)
    compile(choice.how, "how", "exec")


def test_approximate_methods_are_advised_if_they_save_much_time(planned, monkeypatch):
    assert choose("22.5GiB", "full-remat", "lowmembp").method == "lowmembp"
    choice = choose("22.5GiB")
    assert choice.comparison.fastest.method == "lowmembp"
    assert str(choice).startswith("dots is the fastest exact method that fits: 20.00 GiB of 22.50")
    assert "; lowmembp takes 8% less time, with approximate gradients\n" in str(choice)
    # The planner does not know the user's own methods.
    monkeypatch.setitem(METHODS, "own", (20, 11.9))
    assert choose(None, "own", "dots").method == "dots"
    assert choose(None, "own", "lowmembp").method == "lowmembp"


def test_each_row_is_told(planned, capsys, monkeypatch):
    monkeypatch.setattr(comparison_module, "workers", lambda: 1)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # no dependency
    lm.memory.compare(named, ["default", "dots", "full-remat"], batch=64, cache=False)
    assert capsys.readouterr().err == (
        "planning 3 methods, batch 64, up to 1 at once\n"
        "default       30.00 GiB     10.0 ms (estimate)  fits; 2 left, 0 s\n"
        "dots          20.00 GiB     12.0 ms (estimate)  fits; 1 left, 0 s\n"
        "full-remat     5.00 GiB     20.0 ms (estimate)  fits; done, 0 s\n"
    )


def test_the_methods_that_are_compared(planned, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "METHODS", dict.fromkeys(TABLE, (1, 1)))
    usual = ["default", "dots", "full-remat", "compress", "compress+remat", "lowmembp+compress"]
    assert [one.method for one in lm.memory.compare(named, **QUIET)] == usual
    twice = lm.memory.compare(named, ["dots", "default", "dots"], **QUIET)
    assert [one.method for one in twice] == ["dots", "default"]


def test_texts_of_a_comparison(planned):
    with pytest.raises(lm.memory.NothingFitsError, match=r"4.00 GiB: .* 5.00 GiB, with 'full-rem"):
        choose("4GiB")
    comparison = choose("25GB").comparison
    shown = str(comparison)
    assert shown.count("\nnote: a note") == shown.count("\nnote: another") == 1
    assert shown.count("does not fit") == 1  # default
    assert all(f"\n{one.method} " in shown for one in comparison)
    assert re.search(r"^dots .* fits, advised$", shown, re.MULTILINE)
    text = lambda method, batch: lm.memory.Workload(lambda: method, (), tokens=128 * batch)  # noqa: E731
    found = lm.memory.compare(text, ["default"], batch=8, **QUIET)
    assert found.tokens == found.to_dict()["tokens"] == 1024
    assert "tokens/s" in str(found) and "102,400" in str(found)
    data = comparison.to_dict()
    assert (data["fastest"], data["advised"]) == ("lowmembp", "dots")
    assert data["budget_bytes"] == 25 * 10**9
    assert [one["plan"]["fits"] for one in data["methods"]] == [False, True, True, True]


def test_picture_of_memory_against_time(planned, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "worse", METHODS["default"])  # labels that would overlap
    comparison = choose("25GB", *METHODS).comparison
    plot_comparison(comparison, tmp_path / "plan.svg", "$no_formula^$")
    picture = (tmp_path / "plan.svg").read_text()
    texts = ("$no_formula^$", *(one.method for one in comparison))
    assert all(f">{text}</text>" in picture for text in texts)


@pytest.mark.parametrize(("gib", "verdict"), [(15, "fits"), (20, "=0.85"), (23, "not fit")])
def test_the_fraction_of_memory_that_would_do(gib, verdict):
    device, parts = lm.memory.get_device("rtx4090"), (gib * 2**30, *[0] * 8)
    plan = lm.memory.Plan(device, 1, 0.75, *parts, live=(), cost=Cost((), ()))
    assert plan.verdict.endswith(verdict) and plan.verdict in str(plan)


def factory(method, batch):
    """Two layers; a plain pair of step and arguments."""
    activation = {"default": jax.nn.gelu, "lowmembp": lm.regelu2}[method]

    def loss(params, x):
        for weight in params:
            x = activation(x @ weight)
        return x.astype(jnp.float32).sum()

    weight = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    return jax.grad(loss), ([weight] * 2, jax.ShapeDtypeStruct((batch, 64), jnp.bfloat16))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The programs that were compiled, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steps = []
    original = comparison_module.plan_lowered

    def counted(step):
        steps.append(step)
        return original(step)

    monkeypatch.setattr(comparison_module, "plan_lowered", counted)
    monkeypatch.setattr(plan_cache, "plan_lowered", counted)
    return steps


@pytest.mark.compiled
def test_the_cache_of_plans(compiled):
    methods = ["lowmembp", "default"]
    given = {"batch": 65536, "device": "h100", "progress": False}
    comparison = lm.memory.compare(factory, methods, **given)
    assert [one.method for one in comparison] == methods
    assert comparison.budget == lm.memory.get_device("h100").usable_bytes()
    assert comparison["lowmembp"].plan.peak < comparison["default"].plan.peak
    assert len(compiled) == 2
    assert lm.memory.compare(factory, methods, **given) == comparison
    assert len(compiled) == 2
    # A file that is no plan is made again, and a folder that cannot be written is left alone.
    (file, *_) = lm.memory.plan_cache_directory().glob("*.json")
    file.write_text("[" * 100_000)
    lm.memory.compare(factory, methods, **given)
    file.unlink()
    file.mkdir()
    lm.memory.compare(factory, methods, **given)
    assert len(compiled) == 4
    # Another device or program is another plan.
    for change in ({"device": "a6000"}, {"batch": 1024}, {"batch": 1024, "cache": False}):
        lm.memory.compare(factory, ["default"], **given | change)
    assert len(compiled) == 7


@pytest.mark.compiled
def test_plans_that_are_made_are_kept_if_the_next_one_fails(compiled, monkeypatch):
    def then_fails(method, batch):
        step, args = factory("default", batch)

        def interrupted(*args):
            raise KeyboardInterrupt

        return interrupted if method == "lowmembp" else step, args

    monkeypatch.setattr(comparison_module, "workers", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        lm.memory.compare(then_fails, ["default", "lowmembp"], batch=256, progress=False)
    assert len(compiled) == 1
    lm.memory.compare(then_fails, ["default"], batch=256, progress=False)
    assert len(compiled) == 1


@pytest.mark.compiled
def test_methods_that_a_factory_knows_and_the_callers_contexts():
    def one_of_two(method, batch):
        return {"default": factory, "own": factory}[method]("default", 8)

    with pytest.raises(ValueError, match="method: step_factory"):
        lm.memory.compare(one_of_two, batch=8)
    one_of_two.methods = ("default", "own")
    compared = lm.memory.compare(one_of_two, batch=8, **QUIET)
    assert [one.method for one in compared] == ["default", "own"]
    arguments = jax.ShapeDtypeStruct((8,), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    mixed = lambda method, batch: (lambda x, y: x + y, arguments)  # noqa: E731
    with pytest.raises(jax.dtypes.TypePromotionError):
        lm.memory.compare(mixed, ["default"], batch=8, **QUIET)
    with jax.numpy_dtype_promotion("standard"):
        lm.memory.compare(mixed, ["default"], batch=8, **QUIET)


@pytest.mark.compiled
def test_memory_that_a_workload_donates_is_not_there_twice():
    def factory(method, batch):
        state = jax.ShapeDtypeStruct((2**20,), jnp.float32)
        donated = (0,) if method == "donated" else ()
        return lm.memory.Workload(lambda state: state * 2, (state,), donate_argnums=donated)

    compared = lm.memory.compare(factory, ["donated", "kept"], **QUIET)
    assert compared["kept"].plan.peak - compared["donated"].plan.peak == 4 * 2**20


def search(peak, budget, **kwargs):
    """The largest batch that is found, and those that were asked for."""
    steps, calls = largest_batch(budget, **kwargs), []
    try:
        calls.append(next(steps))
        while True:
            calls.append(steps.send(peak(calls[-1])))
    except StopIteration as stop:
        return stop.value, calls


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("shape", ["line", "steps", "curve"])
def test_largest_batch_is_that_of_trying_all(shape, multiple):
    rng = random.Random(0)
    for _ in range(100):
        fixed, each, budget = rng.uniform(0, 100), rng.uniform(0.3, 5), rng.uniform(0, 400)
        peak = {
            "line": lambda b, f=fixed, e=each: f + e * b,
            "steps": lambda b, f=fixed, e=each: f + e * b + 9 * (b // 7),
            "curve": lambda b, f=fixed, e=each: f + e * b + b**2 / 50,
        }[shape]
        expected = 0
        while peak(expected + multiple) <= budget:
            expected += multiple
        start = rng.choice([1, 8, 64])
        found, calls = search(peak, budget, start=start, multiple=multiple, most=1000)
        assert len(set(calls)) == len(calls)
        assert found == expected, (fixed, each, budget, start)


def test_a_flat_line_through_two_close_batches_is_not_followed_far():
    """A batch 16 times too large takes XLA minutes to compile."""
    padded = lambda batch: -(-batch // 64) * 64  # noqa: E731
    found, calls = search(padded, 2600, start=2504, multiple=8)
    assert found == 2560
    assert max(calls) < 4000
    # A line takes few compilations.
    found, calls = search(lambda batch: 1000 + 7 * batch, 50_000, start=64)
    assert found == 7000 and len(calls) <= 4
