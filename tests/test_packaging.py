"""What a wheel has in it, and what it says of itself."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: Packages that nobody needs who plans a step. Flax itself needs Orbax, and matplotlib Pillow.
NOT_NEEDED = ("qwix", "tensorboardX", "tokenizers", "safetensors", "tqdm")


def test_every_package_is_in_the_wheel():
    found = {
        ".".join(path.relative_to(ROOT).parts)
        for top in ("lowmembp_jax", "pallas_kernels")
        for path in {file.parent for file in (ROOT / top).rglob("*.py")}
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of an unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, ROOT]
    subprocess.run([str(word) for word in command], check=True)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("model", ["vit-b16", "llama-3-8b", "config.json"])
def test_the_wheel_plans_models_without_a_checkout(wheel, model, tmp_path):
    if model == "config.json":
        given = ROOT / "tests" / "data" / "hf_tiny" / "llama" / "config.json"
        (tmp_path / model).write_text(given.read_text())
    code = f"""
import sys
for name in {NOT_NEEDED}:
    sys.modules[name] = None
import lowmembp_jax
assert lowmembp_jax.__file__.startswith({str(wheel)!r})
from lowmembp_jax import cli
sys.exit(cli.main("plan --model {model} --batch 1 --method default".split()))
"""
    environment = os.environ | {"PYTHONPATH": str(wheel), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment)
    assert done.returncode in (0, 3)  # it fits, or it does not fit


def test_every_file_of_the_library_is_in_the_wheel():
    globs = PROJECT["tool"]["setuptools"]["package-data"]["lowmembp_jax"]
    library = ROOT / "lowmembp_jax"
    data = {
        path for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    data = {path for path in data if path.suffix != ".py"}
    assert data == {path for glob in globs for path in library.glob(glob)}
    assert library / "py.typed" in data


def test_the_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = [name for name in re.findall(r"^## (\S+)", changelog, re.MULTILINE)]
    assert PROJECT["project"]["version"] in dated[:2]


@pytest.mark.parametrize("folder", ["lowmembp_jax", "pallas_kernels", "docs"])
def test_nothing_knows_the_examples(folder):
    """Imports go one way: examples, the library, the kernels."""
    own = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
        assert not own.intersection(found), path
