"""Reads and writes Hugging Face's checkpoints: a folder with config.json and model.safetensors.

    family, config, params = load("bert-base-uncased")
    model = family.build(config, Compute())
    logits = model.apply({"params": params}, input_ids)
    save("tuned", family, config, params)

`Family.hugging_face_name` returns a tensor's name for a path in the parameter tree. If `nn.scan`
stacked the layers, the name holds "{layer}", and the parameter's leading axis runs over the tensors
of layers 0, 1, 2, ...
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from lowmembp_jax.models import Compute, Family, swin
from lowmembp_jax.models.config_json import read_json
from lowmembp_jax.models.families import read_config
from lowmembp_jax.models.workload import abstract_batch

Params = dict[str, Any]
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load(
    folder: str | Path, *, new_labels: int | None = None, seed: int = 0
) -> tuple[Family, Any, Any]:
    """Reads a checkpoint; returns the family, the config, and parameters in the tensors' dtypes.

    `new_labels` starts a new classifier with this number of outputs, drawn from `seed`. Modules
    before it that the checkpoint lacks, such as BERT's pooler, are new as well. Errors are
    ValueErrors that name the file and the tensors.
    """
    folder = Path(folder)
    family, config = read_config(folder / "config.json")
    tensors = read_tensors(folder)
    if not any(name.startswith(family.prefix) for name in tensors):  # an encoder without a head
        tensors = {family.prefix + name: tensor for name, tensor in tensors.items()}
    new = []
    if new_labels is not None:
        config = dataclasses.replace(config, num_labels=new_labels)
        name_of = family.hugging_face_name
        new = [
            name
            for name in family.head
            if name == "classifier" or name_of((name, "bias")) not in tensors
        ]
    model, inputs = family.build(config, Compute()), example_inputs(family, config)

    def draw(key):
        return model.init(key, *inputs)["params"]

    key = jax.random.key(seed)
    try:
        params = to_params(tensors, jax.eval_shape(draw, key), family, new)
    except ValueError as error:
        raise ValueError(f"{folder}: the checkpoint does not fit the model: {error}") from error
    if new:  # XLA draws only the returned modules
        drawn = jax.jit(lambda key: {name: draw(key)[name] for name in new})(key)
        params |= jax.device_get(drawn)
    return family, config, params


def save(
    folder: str | Path,
    family: Family,
    config: Any,
    params: Mapping[str, Any],
    *,
    classes: Sequence[str] = (),
    tokenizer: str | None = None,
) -> None:
    """Writes a checkpoint that `load` and transformers read, with the parameters' dtypes.

    Args:
      folder: is made if needed.
      family, config, params: as from `load`. Norms are not merged, and there is no LoRA.
      classes: the names of the classifier's outputs, if the loaded config.json has others.
      tokenizer: the content of tokenizer.json.
    """
    tensors = from_params(params, family)
    if family.name == "swin":
        tensors |= swin.buffers(config)
    keys = config.to_json()
    if classes:
        numbers = {name: number for number, name in enumerate(classes)}
        keys |= {"id2label": dict(enumerate(classes)), "label2id": numbers}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # transformers refuses a file that does not name its layout.
    save_file(arrays, folder / _FILE, metadata={"format": "pt"})


def example_inputs(family: Family, config: Any) -> tuple[jax.Array, ...]:
    """Returns zeros as the inputs of a model for one example."""
    tokens = min(8, getattr(config, "max_tokens", 0))
    inputs = abstract_batch(family.task, 1, tokens, config).inputs
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors by name, in their own dtypes, from one file or from an index's files."""
    files = {_FILE}
    if not (folder / _FILE).exists():
        if not (folder / _INDEX).exists():
            raise ValueError(f"{folder}: expected {_FILE} or {_INDEX}, got neither")
        files = set(read_json(folder / _INDEX)["weight_map"].values())
    tensors = {}
    for file in sorted(files):
        for name, tensor in _read_file(folder / file).items():
            # bert-base-uncased calls a norm's scale gamma and its bias beta.
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
            tensors[name.replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    return tensors


def _read_file(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises several types
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error


def to_params(
    tensors: Mapping[str, np.ndarray], abstract: Any, family: Family, new: Sequence[str] = ()
) -> Params:
    """Makes a parameter tree of NumPy arrays from tensors by name, in the tensors' dtypes.

    `abstract` has the parameters' shapes. The result leaves out the modules in `new`. A ValueError
    names all tensors that are missing, unknown, or have a wrong shape.
    """
    name_of, used, problems = family.hugging_face_name, set(), []

    def read(path, leaf):
        keys = tuple(entry.key for entry in path)
        names, stacked = _names(name_of(keys), leaf.shape)
        used.update(names)
        if keys[0] in new:
            return None
        shape = leaf.shape[1:] if stacked else leaf.shape
        expected = _to_torch(keys, np.broadcast_to(np.float32(0), shape)).shape
        layers = []
        for name in names:
            tensor = tensors.get(name)
            if tensor is None:
                problems.append(f"missing {name}")
            elif tensor.shape != expected:
                problems.append(f"{name} has shape {tensor.shape}, expected {expected}")
            else:
                if keys[-1] == "kernel":
                    tensor = tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
                layers.append(tensor.reshape(shape))
        if len(layers) == len(names):
            return np.stack(layers) if stacked else layers[0]

    params = jax.tree_util.tree_map_with_path(read, abstract)
    unused = family.module.UNUSED
    problems += [
        f"unknown {name}"
        for name in sorted(tensors.keys() - used)
        if not any(fnmatchcase(name, pattern) for pattern in unused)
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return {name: tree for name, tree in params.items() if name not in new}


def from_params(params: Mapping[str, Any], family: Family) -> dict[str, np.ndarray]:
    """Makes tensors by Hugging Face's names from parameters. It inverts `to_params`."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys, leaf = tuple(entry.key for entry in path), np.asarray(leaf)
        names, stacked = _names(family.hugging_face_name(keys), leaf.shape)
        for name, layer in zip(names, leaf if stacked else [leaf], strict=True):
            tensors[name] = _to_torch(keys, layer)
    return tensors


def _names(name: str, shape: tuple[int, ...]) -> tuple[list[str], bool]:
    """Returns the tensors' names, and whether the parameter is a stack of them."""
    stacked = "{layer}" in name
    return [name.format(layer=i) for i in range(shape[0] if stacked else 1)], stacked


def _to_torch(keys: tuple[str, ...], leaf: np.ndarray) -> np.ndarray:
    """Returns PyTorch's layout: [out, in], [out, in, height, width], and heads in one axis."""
    if keys[-1] == "bias":
        return leaf.reshape(-1)
    if keys[-1] != "kernel":
        return leaf
    if leaf.ndim == 4:
        return leaf.transpose(3, 2, 0, 1)
    # Only the Dense after attention has several input axes, heads and head size.
    inputs = leaf.shape[:-1] if keys[-2] == "attention_output" else leaf.shape[:1]
    return leaf.reshape(math.prod(inputs), -1).T
