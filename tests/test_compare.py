"""examples/benchmarks/compare.py: which cells, how it goes on, and one row of a small model."""

import dataclasses
import json
from collections import Counter
from itertools import product
from types import SimpleNamespace

import jax
import pytest
from lowmembp_examples.benchmarks import compare, compare_tables, json_lines
from lowmembp_examples.benchmarks.compare import METHODS, cells, read
from lowmembp_examples.benchmarks.table_names import COMPARE_METHODS, COMPARED, TRAINED
from lowmembp_examples.benchmarks.validate import Cell
from lowmembp_examples.trainer.models import MODELS

import lowmembp_jax as lm
from lowmembp_jax.memory.largest_batch import largest_batch

pytestmark = pytest.mark.slow

TINY = Cell("llama-tiny", "lora-qv", "scan", "default", "h200", 2, 32)
FOUR = cells(["llama-tiny"], ["full"], ["default", "dots"], ["h200", "l4"], ["scan"])


def test_the_most_telling_cells_come_first():
    found = cells()
    assert len(set(found)) == len(found)
    first = [cell for cell in found if cell.device == "h200"][: 2 * len(METHODS)]
    assert found[: len(first)] == first
    assert Counter((c.model, c.train) for c in first) == {
        ("vit-b16", "full"): len(METHODS),
        ("vit-b16", "lora-qv"): len(METHODS),
    }
    assert set(lm.memory.METHODS) < {cell.method for cell in first}
    # The other GPUs come before what else is trained and before layers otherwise run.
    devices = [cell.device for cell in found]
    later = min(i for i, cell in enumerate(found) if cell.train == "lora-all")
    assert set(devices[:later]) == {"h200", "a100-80gb", "rtx4090"}
    assert all(c.layers != MODELS[c.model][0].layers[0] for c in found[-len(found) // 10 :])
    assert {(c.model, c.layers) for c in found} == set(
        product({cell.model for cell in found}, ("scan", "unrolled"))
    )
    assert {cell.model for cell in found if cell.train == "qlora-all"} == {"llama-1b", "llama-7b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "vit-b17"], "models: expected names from vit-b16, llama-7b"),
        (["--models", "vit-b16", "--train", "qlora-all"], "nothing to compare: vit-b16 with"),
        (["--devices", "h300"], "h300"),
    ],
)
def test_flags_that_leave_nothing(arguments, message, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert compare.main([*arguments, "--output", str(output)]) == 2
    assert message in capsys.readouterr().err and not output.exists()


def test_a_file_that_holds_something_else(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    json_lines.append(output, dataclasses.asdict(TINY))
    with output.open("a") as file:
        file.write('{"model": "vit"}\n{"mod')
    assert compare.main(["--output", str(output)]) == 2
    assert "rows.jsonl, line 2: " in capsys.readouterr().err


class Columns(dict):
    """In place of XLA: finds something for each cell, but for what it is told."""

    def __init__(self, *names, fails=(), stops_at=None):
        super().__init__({name: lambda cell, name=name: self.fill(cell, name) for name in names})
        self.fails, self.stops_at, self.asked = fails, stops_at, []

    def fill(self, cell, name):
        if len(self.asked) == self.stops_at:
            raise KeyboardInterrupt
        self.asked.append((cell, name))
        if cell in self.fails:
            raise ValueError("no tiles\nfound")
        return {"status": "planned", "peak": 3} if name == "status" else {name: {"24GB": 8}}


def test_it_goes_on_where_it_stopped(tmp_path):
    output = tmp_path / "rows.jsonl"
    columns = Columns("status", stops_at=2)
    with pytest.raises(KeyboardInterrupt):
        compare.run(FOUR, output, columns)
    assert [cell for cell, _ in columns.asked] == FOUR[:2]
    # Killed in the middle of a line.
    output.write_bytes(output.read_bytes()[:-9])
    assert list(read(output)) == FOUR[:1]
    columns = Columns("status")
    assert compare.run(FOUR, output, columns) == 0
    assert [cell for cell, _ in columns.asked] == FOUR[1:]
    assert [json.loads(line)["peak"] for line in output.read_text().splitlines()] == [3] * 4
    columns = Columns("status")
    assert compare.run(FOUR, output, columns) == 0 and not columns.asked


def test_what_failed_comes_last(tmp_path):
    output = tmp_path / "rows.jsonl"
    columns = Columns("status", "largest_batch", fails=FOUR[:1])
    assert compare.run(FOUR[:2], output, columns) == 1
    # Without a plan nothing else is tried.
    assert [name for _, name in columns.asked] == ["status", "status", "largest_batch"]
    failed, done = read(output).values()
    assert failed["status"] == "failed: ValueError: no tiles found" and "peak" not in failed
    assert done["largest_batch"] == {"24GB": 8}
    columns = Columns("status", "largest_batch")
    assert compare.run(FOUR, output, columns) == 0
    assert [cell for cell, name in columns.asked if name == "status"] == [*FOUR[2:], FOUR[0]]
    assert all(row["status"] == "planned" for row in read(output).values())


def test_a_column_more_is_added_to_what_is_there(tmp_path):
    output = tmp_path / "rows.jsonl"
    compare.run(FOUR, output, Columns("status"))
    columns = Columns("status", "largest_batch", fails=FOUR[3:])
    assert compare.run(FOUR, output, columns) == 1
    assert {name for _, name in columns.asked} == {"largest_batch"}
    rows = list(read(output).values())
    assert len(rows) == 4 and all((row["status"], row["peak"]) == ("planned", 3) for row in rows)
    assert rows[0]["largest_batch"] and rows[3]["largest_batch"].startswith("failed")


@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("jax_defaults")
def test_a_small_model(tmp_path, capsys):
    output = tmp_path / "new folder" / "rows.jsonl"
    flags = "--models llama-tiny --train lora-qv --methods default lowmembp --layers scan"
    arguments = [*flags.split(), "--devices", "h200", "--output", str(output)]
    assert compare.main(arguments) == 0
    default, ours = read(output).values()
    assert [row["method"] for row in (default, ours)] == ["default", "lowmembp"]
    for row in (default, ours):
        assert row["peak"] == sum(row["parts"].values()) > row["activations"] > 0
        assert row["estimated_seconds"] > 0 and row["bytes_moved"] > row["peak"]
        assert row["versions"]["jax"] == jax.__version__
    assert ours["activations"] < default["activations"] and ours["flops"] == default["flops"]
    before = output.read_bytes()
    assert compare.main(arguments) == 0 and output.read_bytes() == before
    assert "2 cells, 0 errors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("megabytes_each", "found"),
    [
        ({8: 40, 256: 40}, {"24GB": 600, "80GB": 2000}),
        ({8: 40, 256: 10}, {"24GB": 2304, "80GB": 7936}),  # XLA pads where it is not 256
        ({8: 40, 256: 50}, {"24GB": 600, "80GB": 2000}),
        ({8: 30000, 256: 30000}, {"24GB": 0, "80GB": 0}),
    ],
)
def test_the_largest_batch(monkeypatch, megabytes_each, found):
    def plan(_, methods, *, batch, budget, find_largest_batch, batch_multiple, **options):
        search = largest_batch(
            10**9 * int(budget.removesuffix("GB")), start=batch, multiple=batch_multiple
        )
        try:
            size = next(search)
            while True:
                size = search.send(10**6 * megabytes_each[8 if size % 256 else 256] * size)
        except StopIteration as end:
            return [SimpleNamespace(largest_batch=end.value)]

    monkeypatch.setattr(compare.lm.memory, "compare", plan)
    [cell] = cells(["vit-b16"], ["lora-all"], ["full-remat"], ["h200"], ["unrolled"])
    assert compare.largest_batch(cell) == {"largest_batch": found}


def test_tables_have_what_was_planned(tmp_path, monkeypatch):
    output = tmp_path / "rows.jsonl"
    row = {"status": "planned", "peak": 3 * 2**30, "estimated_seconds": 0.0123}
    methods, devices = ["default", "dots", "compress"], ["h200", "rtx4090"]
    vit = cells(["vit-b16"], ["full"], methods, devices, ["unrolled"])
    other = cells(["vit-b16"], ["full"], ["default"], ["h200"], ["scan"])
    other += cells(["llama-1b"], ["full"], ["default"], ["h200"], ["unrolled"])
    for cell in vit + other:
        json_lines.append(output, dataclasses.asdict(cell) | row)
    largest = {"24GB": 256, "80GB": 1880}
    json_lines.append(output, dataclasses.asdict(vit[0]) | {"largest_batch": largest})
    json_lines.append(output, dataclasses.asdict(vit[1]) | {"status": "failed: no tiles"})
    monkeypatch.setattr(compare_tables, "ROWS", output)
    several = compare_tables.TABLES.keys() - {"compare_summary", "plan_of_vit"}
    tables = {name: compare_tables.TABLES[name]() for name in several}
    header = ["model, batch, trained", *COMPARE_METHODS.values()]
    assert all(table[0] == header for table in tables.values())

    def row_of(name, **cells):
        return [name, *(cells.get(method, "") for method in COMPARE_METHODS)]

    vit_full, both = "ViT-B/16, 64, full", "3.00, 12.3"
    assert {name: rows for name, (_, *rows) in tables.items()} == {
        "compare_peaks": [row_of(vit_full, default="3.00", compress="3.00")],
        "compare_times": [row_of(vit_full, default="12.3", compress="12.3")],
        "compare_gpus": [row_of(f"{vit_full}, RTX 4090", default=both, dots=both, compress=both)],
        "compare_layers": [
            row_of(f"{vit_full}, scan", default=both),
            row_of("LLaMA-1B, 8 x 2048, full, unrolled", default=both),
        ],
        "largest_batches": [row_of(vit_full, default="256, 1,880")],
    }


def test_all_that_is_compared_has_a_name():
    for cell in cells():
        assert cell.model in COMPARED and cell.train in TRAINED and cell.method in COMPARE_METHODS
