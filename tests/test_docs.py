"""README.md and docs/: their examples run, and what they name is there."""

import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import lowmembp_jax as lm

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """README.md, and the pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)


def blocks(page: Path) -> list[str]:
    return _CODE.findall(page.read_text(encoding="utf-8"))


def sections() -> list[tuple[str, str]]:
    """The sections of all pages, with the page's name."""
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in pages()]
    return [(name, part) for name, text in texts for part in re.split("(?m)^#+ ", text)]


WITH_DOCTESTS = [page for page in pages() if any(">>>" in block for block in blocks(page))]


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_DOCTESTS, ids=lambda page: page.name)
def test_examples_print_what_the_page_says(page, jax_defaults):
    examples = "\n".join(block for block in blocks(page) if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    # As on a machine with one device, where rows are stored whole.
    with jax.set_mesh(jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))):
        runner.run(test, out=failures.append)
    assert test.examples and not failures, "".join(failures)


@each_page
def test_names_exist(page):
    """Every `lm.something` on a page is a public name."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\blm\.((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)", text):
        found = lm
        for part in name.split("."):
            assert hasattr(found, part), f"{page.name}: lm.{name}"
            found = getattr(found, part)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links(page):
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_public_name_is_on_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = set(lm.__all__) - {"memory", "nnx"}
    assert names == {name for name in names if re.search(rf"(\.|lm\.){name}\b", text)}


RESULTS = sorted((ROOT / "examples" / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_of_this_version(path):
    """What a page shows was measured with this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = json.loads(path.read_text(encoding="utf-8"))["versions"]
    assert versions["lowmembp_jax"] == project["version"]
    assert versions["jax"] in ("0.10.2", "0.11.2", "0.12.0")


def _numbers(node):
    """All numbers of a JSON document."""
    if isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _numbers(part)
    elif isinstance(node, int | float):
        yield abs(node)


#: From bytes and seconds to the units of the pages.
_UNITS = (1, 100, 1e3, 2**-20, 2**-30, 1e-6, 1e-9, 1e-12)
#: Means with their errors, ratios in brackets, and differences in percent.
_DERIVED = re.compile(r"\S+ ± \S+|\([\d.]+\)|[-+]\d+%")


def measured_tables() -> list[tuple[str, str, list[Path]]]:
    """The first table of each section that names scripts: page, table, and the files of results."""
    found = []
    for page, section in sections():
        names = set(re.findall(r"examples/benchmarks/(\w+)\.py", section))
        files = [path for path in RESULTS if path.stem in names]
        table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
        if files and table:
            found.append((page, table[0], files))
    return found


@pytest.mark.parametrize(("page", "table", "files"), measured_tables())
def test_numbers_are_those_of_the_results(page, table, files):
    """Every number of a table is in the file that the script beside the table wrote."""
    known = [x for path in files for x in _numbers(json.loads(path.read_text(encoding="utf-8")))]
    known = np.array([x * unit for x in known for unit in _UNITS])
    cells = [row.split("|")[2:] for row in table.splitlines()[2:]]
    text = " ".join(_DERIVED.sub("", cell) for row in cells for cell in row)
    for number in re.findall(r"(?<![\w.`(])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.`]|[ -]?bit)", text):
        half = 0.5001 * 10.0 ** -len(number.partition(".")[2])
        assert (abs(known - float(number.replace(",", ""))) <= half).any(), f"{page}: {number}"


def planned_sections() -> list[tuple[str, str]]:
    """Sections whose command plans one method, and the command."""
    return [
        (section, command.replace("\\\n", " "))
        for _, section in sections()
        for command in re.findall(r"^    (lowmembp plan(?:.*\\\n)*.*)$", section, re.MULTILINE)
        if "--method" in command and "--batch" in command and "GiB" in section
    ]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the pages have JAX 0.10.2's plans")
@pytest.mark.parametrize(("section", "command"), planned_sections(), ids=lambda text: text[:40])
def test_commands_print_the_peaks_that_the_section_states(section, command):
    program = Path(sys.executable).parent / "lowmembp"
    ran = subprocess.run(
        [program, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    peak = re.search(r"^peak +([\d.]+) GiB", ran.stdout, re.MULTILINE)
    assert peak, ran.stderr
    assert re.search(rf"\b({peak[1]}|{float(peak[1]):.1f})\b", section), f"{peak[1]}: {command}"


@each_page
def test_no_number_is_of_another_version(page):
    prose = page.read_text(encoding="utf-8")
    dates = re.findall(r"\b20\d\d-\d\d-\d\d\b", prose)
    assert not dates and not re.findall(r"(?:lowmembp_jax|[Vv]ersion) 0\.\d", prose)
