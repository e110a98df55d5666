"""A text classification task that needs no download: which package does this text document?

The texts are docstrings of Python's standard library, and the classes are its best documented
packages. Sources are parsed and never imported. The names of all classes are cut out of the texts.
"""

import ast
import functools
import hashlib
import re
import sysconfig
from collections import defaultdict
from pathlib import Path

_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}

#: How many packages to tell apart.
CLASSES = 8
Labelled = tuple[list[str], list[str]]


def stdlib_sources() -> list[Path]:
    """Returns the standard library's Python files, sorted, without tests and other packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [p for p in sorted(root.rglob("*.py")) if not _SKIP & set(p.relative_to(root).parts)]


def load_stdlib_docs() -> tuple[Labelled, Labelled]:
    """Returns texts and labels to train on, and to evaluate on.

    Every class has as many texts as the smallest class, and texts are distinct. One version of
    Python always gives the same data.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = defaultdict(list)
    for path in stdlib_sources():
        # asyncio/tasks.py is in the package asyncio, and _pydecimal.py in decimal.
        package = path.relative_to(root).parts[0].removesuffix(".py")
        found[re.sub(r"^_(py)?", "", package)] += _docstrings(path)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:CLASSES]
    names = re.compile(rf"\w*(?:{'|'.join(largest)})\w*", re.IGNORECASE)
    owners = defaultdict(set)
    for name in largest:
        for text in found[name]:
            words = names.sub("", text.partition(">>>")[0]).split()
            if len(words) >= 6:
                owners[" ".join(words[:80])].add(name)
    by_hash = defaultdict(list)
    for text, packages in owners.items():
        if len(packages) == 1:
            by_hash[packages.pop()].append((hashlib.sha256(text.encode()).digest(), text))
    size = min(len(texts) for texts in by_hash.values())
    train, dev = ([], []), ([], [])
    for name in largest:
        texts = [text for _, text in sorted(by_hash[name])[:size]]
        held_out = size // 5
        for (known, labels), part in ((train, texts[held_out:]), (dev, texts[:held_out])):
            known += part
            labels += [name] * len(part)
    return train, dev


@functools.cache
def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # the file is for another Python, or the distribution left it out
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(x) for x in ast.walk(tree) if isinstance(x, documented)]
    return [text for text in found if text]
