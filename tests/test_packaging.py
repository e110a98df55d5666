"""What a wheel has in it, and what it says of itself."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_in_the_wheel():
    found = {
        ".".join(path.relative_to(ROOT).parts)
        for top in ("lowmembp_jax", "pallas_kernels", "examples")
        for path in {file.parent for file in (ROOT / top).rglob("*.py")}
    }
    renamed = {re.sub("^examples", "lowmembp_examples", name) for name in found}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(renamed)


def test_every_file_of_the_library_is_in_the_wheel():
    globs = PROJECT["tool"]["setuptools"]["package-data"]["lowmembp_jax"]
    library = ROOT / "lowmembp_jax"
    data = {
        path for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    data = {path for path in data if path.suffix != ".py"}
    assert data == {path for glob in globs for path in library.glob(glob)}
    assert library / "py.typed" in data


def test_the_changelog_begins_with_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == PROJECT["project"]["version"]
