"""A checkpoint's classifier in the trainer: its classes are found by name, or a new one begins."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.models.vit_npz import npz_config, npz_name
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.source import (
    find_source,
    fit,
    initial_params,
    match_classes,
    model_inputs,
)

TINY = Path(__file__).parent / "data" / "hf_tiny"
NAMES = {"0": "zebra", "1": "ant", "2": "cat"}
HUGGING_FACE = ("LABEL_0", "LABEL_1", "LABEL_2")  # what it calls classes without names


def checkpoint(path, family="bert", **changes):
    shutil.copytree(TINY / family, path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def match(path, names, new_head=False):
    said = []
    source = find_source(None, path, None, new_head)
    return match_classes(source, said.append, names), *said


@pytest.mark.parametrize("names", [["ant", "cat", "zebra"], ["ant", "zebra"]])
def test_classes_are_found_by_name(tmp_path, names):
    found = match(checkpoint(tmp_path / "a", id2label=NAMES), names)
    assert found == (("zebra", "ant", "cat"), "head: the checkpoint's, for zebra, ant, cat")


@pytest.mark.parametrize("names", [["ant", "dog"], ["Ant", "cat", "zebra"], ["0", "1", "2"]])
def test_other_names_are_an_error_or_a_new_head(tmp_path, names):
    path = checkpoint(tmp_path / "a", id2label=NAMES)
    listed = ", ".join(names)
    with pytest.raises(UsageError, match=f"zebra, ant, cat; the data have {listed}.* --new-head"):
        match(path, names)
    said = f"head: new, for {listed}"
    assert match(path, names, new_head=True) == (tuple(names), said)


def test_a_name_that_stands_twice_is_no_name(tmp_path):
    path = checkpoint(tmp_path / "a", id2label=NAMES | {"2": "zebra"})
    assert match(path, ["ant"])[0] == ("zebra", "ant", "zebra")
    with pytest.raises(UsageError, match="the head is for zebra, ant, zebra; the data have ant"):
        match(path, ["ant", "zebra"])


@pytest.mark.parametrize(
    ("names", "expected", "said"),
    [
        ("abc", "abc", "head: the checkpoint's, which has no names; in order, it is for a, b, c"),
        ("ab", "ab", "head: new, for a, b; the checkpoint's is for 3, without names"),
        (["LABEL_2"], HUGGING_FACE, "head: the checkpoint's, for LABEL_0, LABEL_1, LABEL_2"),
    ],
)
@pytest.mark.parametrize("id2label", [None, dict(enumerate(HUGGING_FACE[:2]))])
def test_heads_without_names(tmp_path, names, expected, said, id2label):
    found = match(checkpoint(tmp_path / "a", id2label=id2label), list(names))
    assert found == (tuple(expected), said)


def test_the_lines_are_short(tmp_path):
    path = checkpoint(tmp_path / "a", id2label=NAMES)
    with pytest.raises(UsageError, match=r"data have 0, 1, .*, 19, \.\.\. \(100 in all\)"):
        match(path, [str(i) for i in range(100)])


def test_names_and_outputs_are_as_many(tmp_path):
    path = checkpoint(tmp_path / "a", id2label={"0": "ant", "1": "bee"})
    with pytest.raises(UsageError, match="id2label: expected 3 names, found 2"):
        find_source(None, path, None)
    assert match(path, ["ant", "bee"], new_head=True)[0] == ("ant", "bee")


@pytest.mark.parametrize("given", [("llama", TINY / "llama"), ("a model", None)])
def test_a_new_head_of_what_has_none(given):
    with pytest.raises(UsageError, match="--new-head needs a --checkpoint of a classifier"):
        find_source(None, given[1], None, new_head=True)


def test_npz_has_no_names(tmp_path):
    source = find_source(None, TINY / "vit", None)
    inputs = model_inputs("image-classification", 0, 32)
    params = initial_params(source, source.config, inputs, jax.random.key(0))
    tensors = from_params(params, npz_name, layout="flax")
    np.savez(tmp_path / "a.npz", **tensors)
    assert match(tmp_path / "a.npz", list("edcba"))[0] == tuple("edcba")
    assert "new, for a, b" in match(tmp_path / "a.npz", list("ab"))[1]
    for name, change in (("embedding/kernel", tensors["embedding/kernel"][0]), ("head/bias", "x")):
        np.savez(tmp_path / "b.npz", **tensors | {name: np.array(change)})
        with pytest.raises(UsageError, match=f"{name}: expected . axes, got"):
            find_source(None, tmp_path / "b.npz", None)
    assert npz_config(tensors) == npz_config(tensors, num_labels=5)


@pytest.mark.parametrize(("family", "task"), [("bert", "text"), ("swin", "image")])
def test_a_loaded_head_gives_the_outputs_of_its_classes(family, task, tmp_path):
    """The task's labels count the rows of the very head that is loaded, whatever their order."""
    rows = 3 if family == "bert" else 5
    names = [f"class {i}" for i in np.random.default_rng(0).permutation(rows)]
    path = checkpoint(tmp_path / "a", family, id2label=dict(enumerate(names)))
    source = find_source(None, path, None)
    if task == "text":
        text = tmp_path / "a.tsv"
        text.write_text("".join(f"a text\t{name}\n" for name in sorted(names)[1:]))
        data = DataConfig("text-classification", text, text, sequence_length=8)
    else:
        labels = np.arange(rows)
        images = np.zeros((rows, 32, 32, 3), np.uint8)
        np.savez(tmp_path / "a.npz", images=images, labels=labels, classes=sorted(names))
        data = DataConfig("image-classification", tmp_path / "a.npz", tmp_path / "a.npz")
    loaded = load_task(data, lambda given: match_classes(source, print, given))
    labels = loaded.dev.batch(np.arange(len(loaded.dev))).labels
    assert [names[label] for label in labels] == sorted(names)[rows - len(labels) :]
    config = fit(source, loaded, 8, 32)
    inputs = model_inputs(source.family.task, 8, 32)
    params = initial_params(source, config, inputs, jax.random.key(0))
    bias = read_tensors(path)["classifier.bias"]
    np.testing.assert_array_equal(params["classifier"]["bias"], bias)
