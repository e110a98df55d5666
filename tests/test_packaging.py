"""What a wheel has in it, what it imports, and what its self-test says of an installation."""

import inspect
import math
import re
import tomllib
from pathlib import Path

import jax
import pytest
from helpers import python
from jax import lax

import lowmembp_jax as lm
from lowmembp_jax import _jax_internals as jax_internals
from lowmembp_jax import selftest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = [
    path for name in ("lowmembp_jax", "pallas_kernels") for path in (ROOT / name).rglob("*.py")
]
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
    packages = {path.parent.relative_to(ROOT) for path in SOURCES}
    assert sorted(setuptools["packages"]) == sorted(".".join(path.parts) for path in packages)
    files = [path for top in (library, ROOT / "pallas_kernels") for path in top.rglob("*.*")]
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    globs = setuptools["package-data"]["lowmembp_jax"]
    assert data == {path for glob in globs for path in library.glob(glob)}


def test_the_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = [name for name in re.findall(r"^## (\S+)", changelog, re.MULTILINE)]
    assert PROJECT["project"]["version"] in dated[:2]


def test_nothing_knows_the_examples():
    """Imports go one way: examples, the library, the kernels."""
    own = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
        assert not own.intersection(found), path


def test_private_names_of_jax_are_in_one_file():
    private = re.compile(r"jax[./]_src|_check_vma|manual_axis_type|_cache_miss")
    found = [path.name for path in SOURCES if private.search(path.read_text(encoding="utf-8"))]
    assert found == ["_jax_internals.py"]


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (jax.nn.gelu, jax_internals.WHOLE),
        (lax.dot_general, jax_internals.FUNCTIONS),
        (lax.scan, jax_internals.SOURCE),
    ],
)
def test_files_of_jax(function, pattern):
    file = inspect.unwrap(function).__code__.co_filename
    assert re.search(pattern, file)
    assert jax_internals.SOURCE in file
    assert function is not lax.scan or not re.search(jax_internals.FUNCTIONS, file)


@pytest.mark.slow
def test_selftest_passes_in_a_process_of_its_own():
    done = python("-m", "lowmembp_jax.selftest", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*selftest.checks(), "planner"]
    assert last.startswith("all passed, in ")


@pytest.mark.parametrize(
    ("name", "operator", "broken"),
    [
        ("gelu, 2 bits", "gelu", lambda x: lax.stop_gradient(jax.nn.gelu(x))),
        ("gelu, 2 bits", "gelu", jax.nn.gelu),  # right, but saves too much
        ("layer_norm", "ms_layer_norm", lambda x, *affine: x * math.nan),
        ("compress", "compress", lambda fun, **_: fun),
    ],
)
def test_selftest_of_what_is_broken_fails(name, operator, broken, monkeypatch):
    monkeypatch.setattr(lm, operator, broken)
    with pytest.raises(AssertionError, match=r"values|gradients|residuals"):
        selftest.check(*selftest.checks()[name])


def test_a_failure_of_selftest_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "checks", lambda: {"one": (None, None, (), 0.1, None)})
    monkeypatch.setattr(selftest, "check_planner", lambda: "not checked")
    assert selftest.main() == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("one: FAILED, ") and last.startswith("failed: one, in ")
