"""Writes the measured tables of README.md and docs/ from the JSON files in `results/`.

    python examples/benchmarks/readme_tables.py

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`;
`measured_tables.py` has the names. Run it when a file of `results/` is new: a test compares. The
step times of a GPU are one column more as soon as `results/on_gpu.json` is there.
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
    """The page with its tables as the results have them.

    Raises:
      ValueError: a marker has no table, or no end.
    """

    def write(match: re.Match) -> str:
        if match[1] not in tables:
            raise ValueError(f"no table {match[1]!r}; there are {', '.join(tables)}")
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
