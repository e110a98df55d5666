"""Writes the measured tables of README.md and docs/ from the JSON files in `results/`.

    python examples/benchmarks/readme_tables.py

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`;
`measured_tables.py` has the names. Run this script when a file in `results/` changes, because a
test compares them. `results/on_gpu.json` adds a column with a GPU's step times.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from lowmembp_examples.benchmarks.measured_tables import TABLES
from lowmembp_examples.benchmarks.report import Rows, markdown

ROOT = Path(__file__).resolve().parents[2]
_END = "<!-- end of table -->"
_TABLE = re.compile(rf"<!-- table: (\S+) -->\n(.*?){_END}", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str, tables: Mapping[str, Callable[[], Rows]] = TABLES) -> str:
    """Returns the page with its tables filled from the results.

    Raises:
      ValueError: a marker names no known table, or has no end.
    """

    def write(match: re.Match) -> str:
        if match[1] not in tables:
            raise ValueError(f"table: expected one of {', '.join(tables)}, got {match[1]!r}")
        return f"<!-- table: {match[1]} -->\n{markdown(tables[match[1]]())}{_END}"

    if text.count("<!-- table: ") != len(_TABLE.findall(text)) or text.count(_END) != text.count(
        "<!-- table: "
    ):
        raise ValueError(f"each <!-- table: NAME --> needs a line {_END}")
    return _TABLE.sub(write, text)


def main() -> None:
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := fill(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
