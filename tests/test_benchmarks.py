"""The benchmarks: what they compute, how they continue, and the tables made from their results."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from lowmembp_examples.benchmarks import (
    compare,
    json_lines,
    other_models,
    published,
    quality_report,
    real_models,
    training_quality,
)
from lowmembp_examples.benchmarks.measured_tables import TABLES, read
from lowmembp_examples.benchmarks.published_steps import layer_products, scan_of_layers
from lowmembp_examples.benchmarks.readme_tables import fill, pages

from lowmembp_jax.models.layers import Compute


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_has_the_numbers_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert fill(text) == text, "run python examples/benchmarks/readme_tables.py"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert set(re.findall(r"<!-- table: (\S+) -->", text)) == set(TABLES)


def test_a_number_that_differs_is_mended():
    page = "a\n<!-- table: t -->\n| old |\n<!-- end of table -->\nb\n"
    mended = fill(page, {"t": lambda: [["x", "y"], ["a", "1.5"], ["b", ""]]})
    table = "| x | y |\n|---|---:|\n| a | 1.5 |\n| b | |\n"
    assert mended == f"a\n<!-- table: t -->\n{table}<!-- end of table -->\nb\n"
    with pytest.raises(ValueError, match=r"table: expected one of .* got 'nothing'"):
        fill("<!-- table: nothing -->\n<!-- end of table -->\n")
    for marker in ("<!-- table: t -->\n| a |\n", "<!-- table: t -->\n" + page):
        with pytest.raises(ValueError, match="needs a line <!-- end of table -->"):
            fill(marker)


def test_damaged_lines_of_results_are_named(tmp_path):
    path = tmp_path / "quality.jsonl"
    json_lines.append(path, {"task": "vit"})
    with path.open("a") as file:
        file.write('{"task": "vi')  # killed while it wrote
    assert json_lines.read(path) == [{"task": "vit"}]
    json_lines.append(path, {"task": "llama"})
    assert [record["task"] for record in json_lines.read(path)] == ["vit", "llama"]
    with pytest.raises(ValueError, match=r"quality.jsonl, line 1: the record lacks method, seed"):
        json_lines.keys(path, ("task", "method", "seed"))
    path.write_text('{"task": "vit"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"quality.jsonl, line 2: expected a JSON record, found"):
        json_lines.read(path)


@pytest.mark.slow
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("jax_defaults")
def test_compared_methods(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(compare.MODELS, "vit-b16", compare.MODELS["llama-tiny"])
    monkeypatch.setitem(compare.SIZES, "vit-b16", (2, 32))
    output = tmp_path / "new folder" / "rows.jsonl"
    arguments = ["--models", "vit-b16", "--train", "lora-qv", "qlora-all", "--output", str(output)]
    arguments += ["--methods", "default", "lowmembp"]
    assert compare.main(arguments) == 0
    [found] = compare.read(output).values()
    default, ours = found["default"], found["lowmembp"]
    for row in (default, ours):
        assert row["peak"] == sum(row["parts"].values()) > row["parts"]["intermediates"] > 0
        assert row["estimated_seconds"] > 0 and row["bytes_moved"] > row["peak"]
        assert row["versions"]["jax"] == jax.__version__
    assert ours["parts"]["intermediates"] < default["parts"]["intermediates"]
    assert ours["flops"] == default["flops"]
    before = output.read_bytes()
    assert compare.main(arguments) == 0 and output.read_bytes() == before

    def broken(step, batch, method):
        if method == "dots":
            raise ValueError("no tiles\nfound")
        return {"estimated_seconds": 1.0}

    monkeypatch.setattr(compare, "planned", broken)
    assert compare.main([*arguments, "dots", "products"]) == 1
    assert "vit-b16, lora-qv, dots: ValueError: no tiles found" in capsys.readouterr().err
    assert compare.read(output)["vit-b16", "lora-qv"].keys() == {"default", "lowmembp", "products"}


def test_comparison_with_bad_arguments(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    output.write_text('{"model": "vit-b16"}\n')
    assert compare.main(["--output", str(output)]) == 2
    assert "rows.jsonl, line 1: the record lacks train, method" in capsys.readouterr().err
    output.unlink()
    with pytest.raises(SystemExit, match=r"--models: expected names from vit-b16.*; got vit-b17"):
        compare.main(["--models", "vit-b17", "--output", str(output)])
    assert not output.exists()


PUBLISHED = read("published")["rows"]


def test_the_file_has_every_case_with_its_published_numbers():
    cases = [(c.what, c.gpu, c.source, c.unit, c.published, c.planned_for) for c in published.CASES]
    names = ("what", "gpu", "source", "unit", "published", "planned_for")
    assert [tuple(row[name] for name in names) for row in PUBLISHED] == cases
    assert all(row["published"].keys() <= row["planned"].keys() for row in PUBLISHED)


@pytest.mark.parametrize(
    ("kind", "unit", "within"), [("memory", None, 0.07), ("time", "ms", 0.02), ("time", "s", 0.15)]
)
def test_what_the_page_says_of_the_differences(kind, unit, within):
    found = [
        row["planned"][name] / number - 1
        for row in PUBLISHED
        if row["kind"] == kind and unit in (None, row["unit"])
        for name, number in row["published"].items()
        if kind == "time" or name == "peak" or row["unit"] == "GB"
    ]
    assert found and max(map(abs, found)) < within


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", ["h200-nvl", "b300"])
def test_times_of_products_are_those_of_the_rates_of_today(device):
    [row] = [row for row in PUBLISHED if row["planned_for"] == device]
    assert layer_products(device) == pytest.approx(row["planned"], rel=1e-6)


@pytest.mark.gpu_compiler
def test_offloaded_activations_leave_the_device():
    kept, offloaded = (scan_of_layers("a100-80gb", offload=offload) for offload in (False, True))
    # The inputs of 10 layers are 2.5 MiB, and the scan keeps the hidden arrays of 1 MiB too.
    assert kept["arguments"] == offloaded["arguments"] == 20.25
    assert kept["temporaries"] - offloaded["temporaries"] > 10


def test_an_interrupted_run_of_published_steps_goes_on(tmp_path, monkeypatch, capsys):
    calls = []

    def case(what, fails=False):
        def plan():
            calls.append(what)
            if fails and calls.count(what) == 1:
                raise KeyboardInterrupt
            return {"peak": 2.0, "more": 1.0}

        return published.Case("memory", what, "GPU", "link", "GiB", {"peak": 1.0}, plan, "h100")

    monkeypatch.setattr(published, "OUTPUT", tmp_path / "published.json")
    monkeypatch.setattr(published, "CASES", (case("a"), case("b", fails=True), case("c")))
    with pytest.raises(KeyboardInterrupt):
        published.main()
    assert [row["what"] for row in json.loads(published.OUTPUT.read_text())["rows"]] == ["a"]
    published.main()
    rows = json.loads(published.OUTPUT.read_text())["rows"]
    assert [row["what"] for row in rows] == ["a", "b", "c"] and calls == ["a", "b", "b", "c"]
    assert rows[0]["planned"] == {"peak": 2.0, "more": 1.0} and "plan" not in rows[0]
    assert "b, peak: 1 GiB, planned 2" in capsys.readouterr().out
    published.main(again=True)
    assert calls == ["a", "b", "b", "c", "a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", other_models.KINDS)
def test_gradients_of_other_models_are_within_some_percent(kind):
    assert other_models.error(kind, "compress") < 0.05
    assert other_models.error(kind, "compress, int8") < 0.015


@pytest.mark.slow
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("kind", other_models.KINDS)
def test_compress_takes_less_than_the_dots_policy(kind):
    if kind == "mixture of 8 experts":
        pytest.skip("docs/compress.md says that compress takes more")
    with jax.numpy_dtype_promotion("standard"):  # for the norms of Flax
        ours, policy = (other_models.plan(kind, m).peak for m in ("compress", "dots policy"))
    assert ours < policy


@pytest.mark.slow
def test_a_model_runs_from_its_first_parameters():
    model = real_models.load("llama", batch_size=2, tokens=16)
    (_, first), (state, second) = model.run(Compute(), 2)
    assert first.loss != second.loss
    before, after = (jax.tree.leaves(params) for params in (model.params, state.params))
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


def train(monkeypatch, output, *arguments):
    monkeypatch.setattr("sys.argv", ["x", "--tasks", "vit", "--output", str(output), *arguments])
    assert training_quality.main() == 0


def test_interrupted_trainings_go_on(tmp_path, monkeypatch):
    output, run = tmp_path / "out" / "quality.jsonl", []

    class Runner:
        def __init__(self, model, setup, method):
            self.compute = training_quality.METHODS[method]

        def run(self, model, name):
            run.append((name, self.compute.bits))
            return {"dev": {"loss": 1.0}, "seconds": 1}

    data = SimpleNamespace(task=SimpleNamespace(source="digits"))
    monkeypatch.setattr(training_quality, "load", lambda *_: data)
    monkeypatch.setattr(training_quality, "Runner", Runner)
    train(monkeypatch, output, "--methods", "plain Flax", "--seeds", "2")
    assert [name for name, _ in run] == [f"vit, plain Flax, seed {seed}" for seed in (0, 1)]
    train(monkeypatch, output, "--methods", "plain Flax", "operators, 4 bits", "--seeds", "2")
    assert run[2:] == [(f"vit, operators, 4 bits, seed {seed}", 4) for seed in (0, 1)]
    assert len(json_lines.read(output)) == 4
    train(monkeypatch, output, "--methods", "plain Flax", "--seeds", "2", "--steps", "3")
    assert json_lines.read(output)[-1]["steps"] == 3  # another training
    both = "operators, 4 bits, and compress"  # is for LoRA, but where it is asked for
    train(monkeypatch, output, "--seeds", "1")
    assert both not in {record["method"] for record in json_lines.read(output)}
    train(monkeypatch, output, "--seeds", "1", "--methods", both)
    assert json_lines.read(output)[-1]["method"] == both


@pytest.mark.slow
def test_a_training_of_each_kind(tmp_path, monkeypatch):
    output = tmp_path / "quality.jsonl"
    methods = ("--methods", "plain Flax", "operators, 4 bits")
    train(monkeypatch, output, *methods, "--seeds", "1", "--steps", "2")
    plain, ours = json_lines.read(output)
    assert len(ours["losses"]) == 2
    assert ours["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-5)  # exact forward
    assert plain["cosines"] == {}
    assert all(0.99 < cosine < 1 for cosine in ours["cosines"].values())
    assert plain["dev"].keys() == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nothing"], "--tasks: expected names from vit; minilm.*; got nothing"),
        (["--methods", "nothing"], "--methods: expected names from plain Flax.*; got nothing"),
        (["--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["--output", "/dev/null/a"], "--output /dev/null/a: "),
    ],
)
def test_bad_arguments_are_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["x", "--output", str(tmp_path / "a"), *arguments])
    with pytest.raises(SystemExit, match=message):
        training_quality.main()
    assert not any(tmp_path.iterdir())


def test_differences_are_paired_by_seed(tmp_path, monkeypatch):
    path = tmp_path / "quality.jsonl"

    def add(method, seed, loss, steps=200):
        row = {"task": "vit", "method": method, "seed": seed, "steps": steps, "data": "digits"}
        row |= {"dev": {"loss": loss, "accuracy": 1 - loss}, "cosines": {"0": 0.9, "100": 0.8}}
        json_lines.append(path, row | {"losses": list(np.linspace(2, loss, 20))})

    # Seeds differ by more than methods do; the fourth has no partner, the last is a shorter run.
    for seed, (plain, ours) in enumerate([(0.5, 0.51), (0.3, 0.32), (0.1, 0.13)]):
        add("plain Flax", seed, plain)
        add("compress", seed, ours)
    add("compress", 3, 0.9)
    add("compress", 4, 0.9, steps=2)
    done = quality_report.trainings(path)
    monkeypatch.setattr(quality_report, "trainings", lambda: done)
    head, plain, compress, *_ = quality_report.metric("loss", ".3f")
    assert head == ["dev loss", "ViT, CIFAR-10 (3 seeds)"]
    assert plain == ["plain Flax", "0.300"]
    # The standard error of .01, .02, .03 is .01 / sqrt(3).
    assert compress == ["`lm.compress`", "0.320 (+0.020 ± 0.006)"]
    assert quality_report.metric("accuracy", ".1%")[2][1] == "68.0% (-2.0 ± 0.6)"
    assert quality_report.cosine()[1][1] == "0.9000, 0.8000"
    quality_report.draw(tmp_path / "losses.svg")
    assert "ViT, CIFAR-10" in (tmp_path / "losses.svg").read_text()
