"""The measured tables of README.md and docs/ are what the JSON files say."""

import json
import re

import pytest
from lowmembp_examples.benchmarks import measured_tables
from lowmembp_examples.benchmarks.measured_tables import TABLES
from lowmembp_examples.benchmarks.readme_tables import ROOT, fill, markdown, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_has_the_numbers_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert fill(text) == text, "run python examples/benchmarks/readme_tables.py"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert set(re.findall(r"<!-- table: (\S+) -->", text)) == set(TABLES)


def test_readme_length():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_a_number_that_differs_is_mended():
    page = "a\n<!-- table: t -->\n| old |\n<!-- end of table -->\nb\n"
    mended = fill(page, {"t": lambda: [["x", "y"], ["a", "1.5"], ["b", ""]]})
    table = "| x | y |\n|---|---:|\n| a | 1.5 |\n| b | |\n"
    assert mended == f"a\n<!-- table: t -->\n{table}<!-- end of table -->\nb\n"


@pytest.mark.parametrize(
    ("page", "error"),
    [
        (
            "<!-- table: nothing -->\n<!-- end of table -->\n",
            "table: expected one of .* got 'nothing'",
        ),
        ("<!-- table: t -->\n| a |\n", "needs a line <!-- end of table -->"),
        (
            "<!-- table: step_tables -->\n\n<!-- table: step_tables -->\n<!-- end of table -->",
            "needs a line",
        ),
    ],
)
def test_markers_that_do_not_work(page, error):
    with pytest.raises(ValueError, match=error):
        fill(page)


def _on_gpu(gpu):
    def record(implementation, milliseconds):
        one = {"implementation": implementation, "milliseconds": milliseconds}
        return {"status": "done", "records": [one | {"method": "lowmembp_jax"}]}

    jobs = {
        "blocks/ViT-B, lowmembp_jax": record("xla", 8.06),
        "blocks/ViT-B, lowmembp_jax, pallas": record("pallas", 7.0),
        "blocks/LLaMA-7B, lowmembp_jax": record("xla", 9.0),
    }
    return json.dumps({"gpu": gpu, "jobs": jobs})


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "none, smoke"])
def test_step_times_of_a_gpu(gpu, tmp_path, monkeypatch):
    block = (measured_tables.RESULTS / "block_memory.json").read_text()
    (tmp_path / "block_memory.json").write_text(block)
    (tmp_path / "on_gpu.json").write_text(_on_gpu(gpu))
    monkeypatch.setattr(measured_tables, "RESULTS", tmp_path)
    rows = TABLES["block_memory"]()
    if gpu.startswith("none"):
        assert rows[0][-1] == "recomputes"
    else:
        assert rows[0][-1] == "step time, H200"
        assert {row[0]: row[-1] for row in rows[1:] if row[-1]} == {"**the operators**": "8.1 ms"}
    assert markdown(rows).count("\n") == 1 + len(rows)
