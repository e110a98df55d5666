"""What others measured, and the planner's numbers beside it: the file, and what the page says."""

import json

import pytest
from lowmembp_examples.benchmarks import published
from lowmembp_examples.benchmarks.measured_tables import read
from lowmembp_examples.benchmarks.published_steps import layer_products, scan_of_layers

ROWS = read("published")["rows"]


def test_the_file_has_every_case_with_its_published_numbers():
    cases = [(c.what, c.gpu, c.source, c.unit, c.published, c.planned_for) for c in published.CASES]
    names = ("what", "gpu", "source", "unit", "published", "planned_for")
    assert [tuple(row[name] for name in names) for row in ROWS] == cases
    assert len({case[:2] for case in cases}) == len(cases)
    assert all(row["published"].keys() <= row["planned"].keys() for row in ROWS)


@pytest.mark.parametrize(
    ("kind", "unit", "within"), [("memory", None, 0.07), ("time", "ms", 0.02), ("time", "s", 0.15)]
)
def test_what_the_page_says_of_the_differences(kind, unit, within):
    found = [
        row["planned"][name] / number - 1
        for row in ROWS
        if row["kind"] == kind and unit in (None, row["unit"])
        for name, number in row["published"].items()
        if kind == "time" or name == "peak" or row["unit"] == "GB"
    ]
    assert found and max(map(abs, found)) < within


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", ["h200-nvl", "b300"])
def test_times_of_products_are_those_of_the_rates_of_today(device):
    [row] = [row for row in ROWS if row["planned_for"] == device]
    assert layer_products(device) == pytest.approx(row["planned"], rel=1e-6)


@pytest.mark.gpu_compiler
def test_offloaded_activations_leave_the_device():
    kept, offloaded = (scan_of_layers("a100-80gb", offload=offload) for offload in (False, True))
    # The inputs of 10 layers are 2.5 MiB, and the scan keeps the hidden arrays of 1 MiB too.
    assert kept["arguments"] == offloaded["arguments"] == 20.25
    assert kept["temporaries"] - offloaded["temporaries"] > 10


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
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
