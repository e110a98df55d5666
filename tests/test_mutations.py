"""tests/mutations.py: its table fits the sources."""

import shlex

import mutations
import pytest

TABLE = mutations.table()


def test_there_are_enough_and_they_differ():
    assert len(TABLE) >= 50 and len({one.name for one in TABLE}) == len(TABLE)


@pytest.mark.parametrize("mutation", TABLE, ids=lambda mutation: mutation.name)
def test_each_has_its_place(mutation):
    text = (mutations.ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    files = [word for word in shlex.split(mutation.tests) if word.startswith("tests/")]
    assert files and all((mutations.ROOT / file).is_file() for file in files)
