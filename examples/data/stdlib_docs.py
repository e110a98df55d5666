"""A text classification task that needs no download: which package does this text document?

The texts are the docstrings of the standard library, the classes its best documented packages.
Sources are parsed and never imported. The names of all classes are cut out of all texts.
"""

import ast
import hashlib
import re
import sysconfig
from collections import defaultdict
from pathlib import Path

from lowmembp_examples.data.files import read_bytes
from lowmembp_examples.data.labelled_text import LabelledText

# These are tests, third-party packages and programs, and no part of the library.
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
_MIN_WORDS = 6
_MAX_WORDS = 80
_DEV_PERCENT = 20


def stdlib_sources() -> list[Path]:
    """Returns the standard library's Python files, sorted, without tests and other packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [p for p in sorted(root.rglob("*.py")) if not _SKIP & set(p.relative_to(root).parts)]


def _package(path: Path) -> str:
    """Returns a file's package: `asyncio` for asyncio/tasks.py, `decimal` for _pydecimal.py."""
    return re.sub(r"^_(py)?", "", path.parts[0].removesuffix(".py"))


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(read_bytes(path))
    except (SyntaxError, ValueError):
        return []  # the file is for another Python, or the distribution left it out
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _shorten(text: str, names: re.Pattern[str]) -> str | None:
    """Returns a docstring up to its first doctest, on one line; None if too few words are left."""
    prose, _, _ = text.partition(">>>")
    words = names.sub("", prose).split()
    return " ".join(words[:_MAX_WORDS]) if len(words) >= _MIN_WORDS else None


def load_stdlib_docs(classes: int) -> tuple[LabelledText, LabelledText]:
    """Returns the train and dev split of the docstrings of the best documented packages.

    Every class has as many texts as the smallest class. Texts are distinct. The split and the order
    depend only on the texts, so one version of Python always gives the same data set.

    Args:
      classes: the number of packages, at least 2.

    Raises:
      ValueError: this standard library has fewer packages with sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = defaultdict(list)
    for path in stdlib_sources():
        found[_package(path.relative_to(root))] += _docstrings(path)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:classes]
    if len(largest) < classes:
        raise ValueError(
            f"classes: expected at most {len(largest)}, the packages of the standard library under "
            f"{root}, got {classes}"
        )
    names = re.compile(rf"\w*(?:{'|'.join(largest)})\w*", re.IGNORECASE)

    owners = defaultdict(set)
    for name in largest:
        for text in found[name]:
            if short := _shorten(text, names):
                owners[short].add(name)
    by_hash = defaultdict(list)
    for text, packages in owners.items():
        if len(packages) == 1:
            digest = hashlib.sha256(text.encode()).digest()
            by_hash[packages.pop()].append((digest, text))
    size = min(len(texts) for texts in by_hash.values())
    splits = LabelledText([], []), LabelledText([], [])
    for name in largest:
        texts = [text for _, text in sorted(by_hash[name])[:size]]
        held_out = size * _DEV_PERCENT // 100
        for split, part in zip(splits, (texts[held_out:], texts[:held_out]), strict=True):
            split.texts.extend(part)
            split.labels.extend([name] * len(part))
    return splits
