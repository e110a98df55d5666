"""The smallest model of each family that has all of its modules, and a small checkpoint."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.data.minilm import minilm_directory
from safetensors.numpy import load_file, save_file

from lowmembp_jax.models import bert, llama, roberta, swin, vit

#: Two layers, of which the second takes the first one's merged norm in BERT, and is shifted in
#: Swin, where patch merging and a stage more follow.
TINY = {
    "vit": vit.ViTConfig(64, 2, 2, 256, image_size=32, patch_size=8, num_labels=8),
    "swin": swin.SwinConfig(
        32, (2, 1), (1, 2), window_size=4, image_size=32, patch_size=4, num_labels=8
    ),
    "bert": bert.BertConfig(64, 64, 2, 2, 256, 64),
    "roberta": roberta.RobertaConfig(64, 64, 2, 2, 256, 66, type_vocab_size=1),
    "llama": llama.LlamaConfig(64, 2, 2, 192, num_key_value_heads=1, vocab_size=64),
}
#: Of a text.
TOKENS = 32


def inputs(family: str, batch: int = 2) -> tuple[jax.Array, ...]:
    """What the model of the family is called with."""
    config, key = TINY[family], jax.random.key(11)
    if family in ("vit", "swin"):
        return (jax.random.normal(key, (batch, config.image_size, config.image_size, 3)),)
    ids = jax.random.randint(key, (batch, TOKENS), 0, config.vocab_size)
    return (ids,) if family == "llama" else (ids, TOKENS - jnp.arange(batch, dtype=jnp.int32))


def small_bert(directory: Path) -> tuple[Any, ...]:
    """Writes a checkpoint and two files of texts; returns the options of finetune.py for them.

    It has corners of MiniLM's matrices, 2 layers of 2 heads, and a classifier of another task.
    """
    minilm = minilm_directory()
    (directory / "tokenizer.json").symlink_to(minilm / "tokenizer.json")
    config = json.loads((minilm / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    (directory / "config.json").write_text(json.dumps(config))
    sizes = {384: 32, 1536: 64}
    tensors = {
        f"bert.{name}": tensor[tuple(slice(sizes.get(size, size)) for size in tensor.shape)].copy()
        for name, tensor in load_file(minilm / "model.safetensors").items()
        if not any(f"layer.{index}." in name for index in range(2, 6))
    }
    tensors["classifier.weight"] = np.zeros((2, 32), np.float32)
    tensors["classifier.bias"] = np.array([100, -100], np.float32)
    save_file(tensors, directory / "model.safetensors")
    lines = "what a fine film\tgood\na dull mess\tbad\n"
    (directory / "train.tsv").write_text(4 * lines)
    (directory / "dev.tsv").write_text(lines)
    files = ("--train", directory / "train.tsv", "--dev", directory / "dev.tsv")
    return ("--checkpoint", directory, *files, "--batch-size", 4, "--max-tokens", 8)
