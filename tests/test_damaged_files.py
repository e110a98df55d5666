"""Every loader of the examples with damaged files: it reads them, or says which file is wrong.

Valid files are damaged at random, from one seed: flipped bits, cut and inserted bytes, other
encodings, other values in JSON.
"""

import io
import json
import random
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lowmembp_examples.checkpoints import read_tensors, write_tensors
from lowmembp_examples.data.digits import draw_digits
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.language import read_file_bytes, read_tokens, text_files
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.data.tokenizer import load_tokenizer, word_tokenizer
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.source import find_source
from PIL import Image

from lowmembp_jax.models.families import FAMILIES

TINY = Path(__file__).parent / "data" / "hf_tiny"
CASES = 30  # of each loader
SECONDS = 5  # a file of some kilobytes takes milliseconds
ROWS = [(f"a {word} film", word) for word in ("good", "bad", "dull", "fine") * 6]
VALUES = (None, True, -1, 0, 1.5, 2**70, "", "x", [], [0], {}, {"0": 1}, [[[]]])


def flip(content, rng):
    changed = bytearray(content)
    for _ in range(rng.choice((1, 3, 30))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content, rng):
    return content[: rng.randrange(len(content))]


def insert(content, rng):
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 100))) + content[at:]


def drop(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + content[at + rng.choice((1, 2, 100)) :]


def repeat(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + content[at : at + 50] * 3 + content[at:]


def encode(content, rng):
    text = content.decode("latin-1")
    return rng.choice((b"\xef\xbb\xbf", b"", b"\0")) + text.replace("a", "\u00e4").encode(
        rng.choice(("utf-16", "utf-32", "latin-1", "utf-8", "cp037"))
    )


def places(value, path=()):
    """The paths of all values within a value of JSON."""
    items = {dict: dict.items, list: enumerate}.get(type(value), lambda _: ())
    for key, inner in items(value):
        yield (*path, key)
        yield from places(inner, (*path, key))


def swap(content, rng):
    """Another value somewhere in JSON; of JSON lines, in the first."""
    first, *rest = content.split(b"\n") if content.count(b"\n{") else [content]
    value = inner = json.loads(first)
    *path, last = rng.choice(list(places(value)))
    for key in path:
        inner = inner[key]
    if rng.random() < 0.2 and isinstance(inner, dict):
        del inner[last]
    else:
        inner[last] = rng.choice(VALUES)
    return b"\n".join([json.dumps(value).encode(), *rest])


ANY = (flip, cut, insert, drop, repeat)


def tensors_file(folder):
    some = {"a": np.ones((3, 4), np.float32), "b": np.arange(5), "c": np.ones(2, np.float16)}
    write_tensors(folder, some, {"model_type": "bert"})
    return folder / "model.safetensors", lambda: read_tensors(folder), ANY


def index_file(folder):
    file, load, _ = tensors_file(folder)
    file.rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys("abc", "model-1.safetensors")})
    )
    return index, load, (*ANY, encode, swap, swap)


def config_file(folder, family):
    file = shutil.copy(TINY / family / "config.json", folder)
    return Path(file), lambda: FAMILIES[family].config.from_json(file), (*ANY, encode, swap, swap)


def whole_checkpoint(folder):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / "bert" / name, folder)
    return folder / "config.json", lambda: find_source(None, folder, None), (flip, encode, swap)


def google_npz(folder):
    layer = "Transformer/encoderblock_0"
    arrays = {
        "embedding/kernel": np.ones((4, 4, 3, 8), np.float32),
        "Transformer/posembed_input/pos_embedding": np.ones((1, 5, 8), np.float32),
        f"{layer}/MultiHeadDotProductAttention_1/query/kernel": np.ones((8, 2, 4), np.float32),
        f"{layer}/MlpBlock_3/Dense_0/kernel": np.ones((8, 16), np.float32),
        "head/bias": np.ones(3, np.float32),
    }
    np.savez(folder / "vit.npz", **arrays)
    return folder / "vit.npz", lambda: find_source(None, folder / "vit.npz", None), ANY


def task_file(folder, name, content, kind, damages=ANY, **options):
    file = folder / name
    file.write_bytes(content)
    config = DataConfig(kind, train=file, image_size=8, sequence_length=4, **options)

    def load():
        task = load_task(config)
        return task.train.batch(np.arange(len(task.train)))

    return file, load, damages


def images_npz(folder):
    file, digits = io.BytesIO(), draw_digits(20, 0)
    np.savez_compressed(file, images=digits.images, labels=digits.labels)
    return task_file(folder, "a.npz", file.getvalue(), "image-classification")


PLANES = np.arange(20 * 3072).astype(np.uint8).reshape(20, 3072)


def cifar_binary(folder):
    labels = np.arange(20, dtype=np.uint8)[:, None] % 10
    content = np.concatenate([labels, PLANES], 1).tobytes()
    return task_file(folder, "data_batch_1.bin", content, "image-classification")


def image_folder(folder):
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(4):
            image = Image.fromarray(PLANES[number].reshape(32, 32, 3))
            image.save(folder / name / f"{number}.{('png', 'jpg')[number % 2]}")
    config = DataConfig("image-classification", train=folder, image_size=8)

    def load():
        task = load_task(config)
        return task.train.batch(np.arange(len(task.train))), task.dev.batch(np.arange(1))

    return folder / "cat" / "0.png", load, ANY


def table(folder):
    content = "".join(f"{text}\t{label}\n" for text, label in ROWS).encode()
    return task_file(folder, "a.tsv", content, "text-classification", (*ANY, encode))


def lines(folder):
    rows = (json.dumps({"text": text, "label": label}) for text, label in ROWS)
    content = "\n".join(rows).encode()
    return task_file(folder, "a.jsonl", content, "text-classification", (*ANY, encode, swap, swap))


def tokenizer_file(folder):
    file = folder / "tokenizer.json"
    file.write_text(word_tokenizer([text for text, _ in ROWS], 50).to_str())
    text = folder / "text.txt"
    text.write_text("a good film, a bad one")

    def load():
        return read_tokens([text], load_tokenizer(file))

    return file, load, (*ANY, encode, *[swap] * 6)


def book(folder, with_tokens):
    file = folder / "book.txt"
    file.write_text("a good film\n" * 40)
    tokenizer = word_tokenizer([file.read_text()], 50)

    def load():
        files = text_files(file)
        return read_tokens(files, tokenizer) if with_tokens else read_file_bytes(files)

    return file, load, (*ANY, encode)


LOADERS = {
    "safetensors": tensors_file,
    "index": index_file,
    **{f"config of {family}": partial(config_file, family=family) for family in FAMILIES},
    "checkpoint": whole_checkpoint,
    "ViT's npz": google_npz,
    "images": images_npz,
    "CIFAR-10": cifar_binary,
    "image folder": image_folder,
    "TSV": table,
    "JSONL": lines,
    "tokenizer": tokenizer_file,
    "book": partial(book, with_tokens=True),
    "book of bytes": partial(book, with_tokens=False),
}


def listing(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize("loader", LOADERS)
def test_damaged(loader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, load, damages = LOADERS[loader](tmp_path)
    load()
    content, rng = file.read_bytes(), random.Random(loader)
    refused = 0
    for case in range(CASES):
        damage = rng.choice(damages)
        damaged = damage(content, rng)
        file.write_bytes(damaged)
        before, start = listing(tmp_path), time.monotonic()
        where = f"case {case}, {damage.__name__}: {damaged[:300]!r}"
        try:
            load()
        except (DataError, UsageError) as error:
            message = str(error)
            assert file.name in message or f"{tmp_path}" in message, (where, message)
            assert len(message) < 1000, (where, message)
            refused += 1
        except BaseException as error:
            error.add_note(where)
            raise
        assert time.monotonic() - start < SECONDS, where
        assert listing(tmp_path) == before, where
    # Bytes are any bytes; elsewhere some damage is seen.
    assert refused or loader == "book of bytes"
