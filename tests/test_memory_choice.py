"""The fastest method that fits a budget, and what comparisons say of a budget."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import lowmembp_jax as lm
from lowmembp_jax.memory.methods import HOW
from lowmembp_jax.memory.plot import pareto, plot_comparison
from lowmembp_jax.memory.report import comparison_report
from lowmembp_jax.memory.roofline.totals import Cost, Kernel

KERNEL = Kernel("k", "fusion", "", "", "other", 1, 1, 0, 0, "", 1, 0.0)
#: GiB at the peak, and milliseconds.
METHODS = {"default": (30, 10), "dots": (20, 12), "lowmembp": (22, 11), "full-remat": (5, 20)}


@pytest.fixture
def planned(monkeypatch):
    """Plans of known peaks and times, without a compiler."""

    def planned(step):
        gib, milliseconds = METHODS[step]
        return lm.memory.Plan(
            lm.memory.get_device("h200"), 1, 0.75, 0, 0, 0, 0, gib * 2**30, 0, 0, 0, 0, (),
            Cost((dataclasses.replace(KERNEL, estimated_seconds=milliseconds / 1e3),), ("a note",)),
            notes=("another",) if step == "dots" else (),
        )  # fmt: skip

    monkeypatch.setattr("lowmembp_jax.memory.comparison.plan_lowered", planned)
    monkeypatch.setattr("lowmembp_jax.memory.comparison.lower_step", lambda step, *_, **__: step())


def factory(method, batch):
    return lambda: method, ()


def choose(budget, **options):
    options = {"cache": False, "progress": False} | options
    return lm.memory.choose(factory, tuple(METHODS), budget=budget, batch=8, **options)


@pytest.mark.parametrize(
    ("budget", "method"),
    [(None, "default"), ("30GiB", "default"), ("25GB", "lowmembp"), (20 * 2**30, "dots"),
     ("6GiB", "full-remat")],
)  # fmt: skip
def test_the_fastest_that_fits(planned, budget, method):
    choice = choose(budget)
    assert choice.method == method
    assert choice.plan is choice.comparison[method].plan
    assert choice.plan.fits and choice.plan.budget == choice.comparison[method].plan.budget
    assert choice.how == HOW[method] and choice.how in str(choice)


def test_nothing_fits(planned):
    with pytest.raises(lm.memory.NothingFitsError) as error:
        choose("4GiB")
    assert str(error.value) == (
        "no method fits in 4.00 GiB: the smallest peak is 5.00 GiB, with 'full-remat'"
    )
    assert not any(one.plan.fits for one in error.value.comparison)


@pytest.mark.parametrize("budget", ["24", 0, "24 apples", "-1GB"])
def test_budgets_that_are_none(planned, budget):
    with pytest.raises(ValueError, match=r"budget.*(is not a size|above 0)"):
        choose(budget)


def test_lines_of_code_for_all_methods():
    for lines in HOW.values():
        compile(lines, "how", "exec")


def test_report_names_winner_and_notes_once(planned):
    with (console := Console(width=200)).capture() as captured:
        console.print(comparison_report(choose("25GB").comparison, "a step"))
    text = captured.get()
    assert text.count("Note: a note.") == text.count("Note: another.") == 1
    assert "lowmembp is the fastest method that fits" in text and "with lm.patch():" in text
    assert text.count("does not fit") == 1  # default


def test_print_a_comparison(planned):
    comparison = choose("25GB").comparison
    text = str(comparison)
    assert all(f"{method}: " in text for method in METHODS)
    assert text.count("does not fit") == 1 and "the fastest method that fits: lowmembp" in text
    assert "note: another" in text and len(text.splitlines()) < 12


@pytest.mark.parametrize(
    ("gib", "fraction", "verdict"),
    [(15, 0.75, "fits"), (20, 0.75, "=0.85"), (20, 0.9, "fits"), (23.5, 0.75, "not fit")],
)
def test_the_fraction_of_memory_that_would_do(gib, fraction, verdict):
    memory = lm.memory.get_device("rtx4090")
    peak = int(gib * 2**30)
    plan = lm.memory.Plan(memory, 1, fraction, peak, 0, 0, 0, 0, 0, 0, 0, 0, (), Cost((), ()))
    assert plan.verdict.endswith(verdict) and plan.verdict in str(plan)


def test_rates_of_text(planned):
    def of_text(method, batch):
        return lm.memory.Workload(lambda: method, (), tokens=128 * batch)

    found = lm.memory.compare(of_text, ["default"], batch=8, cache=False, progress=False)
    assert found.tokens == found.to_dict()["tokens"] == 1024
    with (console := Console(width=200)).capture() as captured:
        console.print(comparison_report(found, "a step"))
    # In 10 ms.
    assert "tokens/s" in captured.get() and "102,400" in captured.get()
    assert "examples/s" in captured.get() and " 800 " in captured.get()


def test_pareto(planned, tmp_path):
    METHODS["worse"] = (31, 13)
    try:
        comparison = choose("25GB").comparison
    finally:
        del METHODS["worse"]
    assert [one.method for one in pareto(comparison)] == [
        "full-remat", "dots", "lowmembp", "default"
    ]  # fmt: skip
    plot_comparison(comparison, tmp_path / "plan.svg", "title")
    picture = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {one.method} -->" in picture for one in comparison)


def test_json_says_what_fits(planned):
    data = choose("25GB").comparison.to_dict()
    assert data["fastest"] == "lowmembp" and data["budget_bytes"] == 25 * 10**9
    fits = {one["method"]: one["plan"]["fits"] for one in data["methods"]}
    assert fits == {"default": False, "dots": True, "lowmembp": True, "full-remat": True}


@pytest.mark.gpu_compiler
def test_budget_of_a_plan():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    assert not lm.memory.plan(jnp.sin, x, budget="4kB").fits
    plan = lm.memory.plan(jnp.sin, x, budget="10kB")
    assert plan.fits and "fits: 10,000 B budget" in str(plan)
    with pytest.raises(ValueError, match=r"budget: '24' is not a size: .* GB, GiB"):
        lm.memory.plan(jnp.sin, x, budget="24")
