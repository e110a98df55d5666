"""What a wheel has in it, and what it says of itself."""

import re
import tomllib
from pathlib import Path

import pytest
from helpers import python

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: Packages that nobody needs who plans a step. Flax itself needs Orbax, and matplotlib Pillow.
NOT_NEEDED = ("qwix", "tensorboardX", "tokenizers", "safetensors", "tqdm")


@pytest.mark.slow
@pytest.mark.compiled
def test_models_are_planned_without_the_packages_of_examples(tmp_path):
    code = f"""
import sys
for name in {NOT_NEEDED}:
    sys.modules[name] = None
from lowmembp_jax import cli
sys.exit(cli.main("plan --model llama-3-8b --batch 1 --method default".split()))
"""
    done = python("-c", code, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode in (0, 3), done.stderr  # it fits, or it does not fit


def test_every_file_of_the_library_is_in_the_wheel():
    setuptools, library = PROJECT["tool"]["setuptools"], ROOT / "lowmembp_jax"
    files = [path for top in (library, ROOT / "pallas_kernels") for path in top.rglob("*.*")]
    packages = {path.parent.relative_to(ROOT) for path in files if path.suffix == ".py"}
    assert sorted(setuptools["packages"]) == sorted(".".join(path.parts) for path in packages)
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    globs = setuptools["package-data"]["lowmembp_jax"]
    assert data == {path for glob in globs for path in library.glob(glob)}


def test_the_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = [name for name in re.findall(r"^## (\S+)", changelog, re.MULTILINE)]
    assert PROJECT["project"]["version"] in dated[:2]


@pytest.mark.parametrize("folder", ["lowmembp_jax", "pallas_kernels"])
def test_nothing_knows_the_examples(folder):
    """Imports go one way: examples, the library, the kernels."""
    own = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
        assert not own.intersection(found), path
