"""examples/benchmarks/training_quality.py and its tables."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from lowmembp_examples.benchmarks import json_lines, quality_report, training_quality


def _train(monkeypatch, output, *arguments):
    monkeypatch.setattr("sys.argv", ["x", "--tasks", "vit", "--output", str(output), *arguments])
    assert training_quality.main() == 0


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
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
    _train(monkeypatch, output, "--methods", "plain Flax", "--seeds", "2")
    assert [name for name, _ in run] == [f"vit, plain Flax, seed {seed}" for seed in (0, 1)]
    first = output.read_text()
    output.write_text(first + '{"task": "vit", "method": "operat')  # killed while it wrote
    _train(monkeypatch, output, "--methods", "plain Flax", "operators, 4 bits", "--seeds", "2")
    assert run[2:] == [(f"vit, operators, 4 bits, seed {seed}", 4) for seed in (0, 1)]
    assert output.read_text().startswith(first) and len(json_lines.read(output)) == 4
    _train(monkeypatch, output, "--methods", "plain Flax", "--seeds", "2", "--steps", "3")
    assert json_lines.read(output)[-1]["steps"] == 3  # another training
    both = "operators, 4 bits, and compress"  # is for LoRA, but where it is asked for
    _train(monkeypatch, output, "--seeds", "1")
    assert both not in {record["method"] for record in json_lines.read(output)}
    _train(monkeypatch, output, "--seeds", "1", "--methods", both)
    assert json_lines.read(output)[-1]["method"] == both


@pytest.mark.slow
def test_a_training_of_each_kind(tmp_path, monkeypatch):
    output = tmp_path / "quality.jsonl"
    methods = ("--methods", "plain Flax", "operators, 4 bits")
    _train(monkeypatch, output, *methods, "--seeds", "1", "--steps", "2")
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
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--output", "/dev/null/a"], "--output /dev/null/a: "),
    ],
)
def test_bad_arguments_are_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["x", "--output", str(tmp_path / "a"), *arguments])
    with pytest.raises(SystemExit, match=message):
        training_quality.main()
    assert not any(tmp_path.iterdir())


def _record(method, seed, loss, steps=200):
    return {
        "task": "vit",
        "method": method,
        "seed": seed,
        "steps": steps,
        "data": "digits",
        "dev": {"loss": loss, "accuracy": 1 - loss},
        "cosines": {"0": 0.9, "100": 0.8},
        "losses": list(np.linspace(2, loss, 20)),
    }


def test_differences_are_paired_by_seed(tmp_path, monkeypatch):
    path = tmp_path / "quality.jsonl"
    # Seeds differ by more than methods do; the fourth has no partner, the last is a shorter run.
    for seed, (plain, ours) in enumerate([(0.5, 0.51), (0.3, 0.32), (0.1, 0.13)]):
        json_lines.append(path, _record("plain Flax", seed, plain))
        json_lines.append(path, _record("compress", seed, ours))
    json_lines.append(path, _record("compress", 3, 0.9))
    json_lines.append(path, _record("compress", 4, 0.9, steps=2))
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


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "quality.jsonl"
    path.write_text(json.dumps(_record("compress", 0, 0.1)) + "\nnonsense\n")
    with pytest.raises(
        ValueError, match=r"quality.jsonl, line 2: expected a JSON record, found 'nonsense'"
    ):
        json_lines.read(path)
    path.write_text('{"task": "vit"}\n')
    with pytest.raises(ValueError, match=r"quality.jsonl, line 1: the record lacks method, seed"):
        json_lines.keys(path, ("task", "method", "seed"))
