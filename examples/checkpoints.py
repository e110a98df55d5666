"""Converts Hugging Face directories (config.json + model.safetensors) to parameter trees and back.

Each model has a function `name_of(path)` that returns a tensor's name for a path of the parameter
tree. If `nn.scan` stacked the layers, the name holds "{layer}". The parameter's leading axis then
runs over the tensors whose names hold 0, 1, 2, ... instead. If the layers are stacked in pairs, the
names of the first hold "{even}" (0, 2, ...) and the names of the second hold "{odd}".

    tensors = read_tensors(directory)
    params = to_params(tensors, abstract_params, llama.hugging_face_name)
    write_tensors(directory, from_params(params, llama.hugging_face_name), config)
"""

import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.data.files import DataError, opened, read_json
from safetensors.numpy import load_file, save_file

NameOf = Callable[[tuple[str, ...]], str]
Layout = Literal["torch", "flax"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tensors(directory: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all tensors of a directory by name, in their own dtypes (also bfloat16).

    Args:
      directory: holds model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
      DataError: both files are missing, or a shard is; a file has another format; a shard lacks a
        tensor of the index, or is outside the directory.
    """
    directory = Path(directory)
    index = directory / _INDEX
    if (directory / _FILE).exists():
        return _read_file(directory / _FILE)
    if not index.exists():
        raise DataError(f"{directory}: expected {_FILE} or {_INDEX}, got neither")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise DataError(f"{index}: weight_map: expected an object, got {reprlib.repr(shard_of)}")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or shard != Path(shard).name:
            found = reprlib.repr(shard)
            raise DataError(f"{index}: {name}: expected a file of this directory, got {found}")
    tensors = {}
    for shard in sorted(set(shard_of.values())):
        read = _read_file(directory / shard)
        if missing := sorted(n for n, of in shard_of.items() if of == shard and n not in read):
            raise DataError(f"{directory / shard}: lacks tensors that {_INDEX} lists: {missing}")
        tensors |= read
    return tensors


def _read_file(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(opened(path))
    except Exception as error:  # the library raises its own error, and others for unknown dtypes
        raise DataError(f"{path}: not a readable safetensors file: {error}") from error


def write_tensors(
    directory: str | os.PathLike, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Makes the directory and writes config.json and, atomically, model.safetensors."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # transformers refuses a file that does not name its layout.
    save_file(arrays, directory / f"{_FILE}.part", metadata={"format": "pt"})
    os.replace(directory / f"{_FILE}.part", directory / _FILE)


def to_params(
    tensors: Mapping[str, np.ndarray],
    abstract_params: Mapping[str, Any],
    name_of: NameOf,
    unused: Sequence[str] = (),
    *,
    dtype: Any = np.float32,
    initial: Mapping[str, Any] | None = None,
    layout: Layout = "torch",
    prefix: str = "",
) -> dict[str, Any]:
    """Makes a parameter tree of NumPy arrays from named tensors.

    Args:
      tensors: arrays by name, from `read_tensors`.
      abstract_params: the model's parameters, nested dicts of arrays or `jax.ShapeDtypeStruct`s.
      name_of: see the module's docstring. Two parameters may share a name (tied weights).
      unused: patterns (`fnmatch`) of names that the model does not use, such as "pooler.*".
      dtype: dtype of the parameters, or None for each tensor's own.
      initial: subtrees by their name in `abstract_params`, which are used unchanged. An example is
        a new `classifier` with another number of classes. The checkpoint's tensors for these
        parameters are ignored.
      layout: "torch": Dense kernels are [out, in], conv kernels are [out, in, height, width], and
        (heads, head size) is one axis; "flax": the model's own layout.
      prefix: prepended to all names if no name begins with it. The checkpoint of an encoder without
        a head needs this.

    Raises:
      ValueError: a tensor is missing, unknown, or has a wrong shape or dtype. The message names
        every such tensor.
    """
    initial = initial or {}
    if unknown := sorted(initial.keys() - abstract_params.keys()):
        raise ValueError(
            f"to_params: initial: expected names among {sorted(abstract_params)}, got {unknown}"
        )
    if not any(name.startswith(prefix) for name in tensors):
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    used, problems = set(), []

    def load(path, leaf):
        keys = _keys(path)
        stack = name_of(keys)
        names = _names(stack, leaf.shape)
        stacked = _is_stack(stack)
        shape = leaf.shape[1:] if stacked else leaf.shape
        used.update(names)
        if keys[0] in initial:
            return None
        expected = _to_layout(layout, keys, np.broadcast_to(np.float32(0), shape)).shape
        layers = []
        for name in names:
            if name not in tensors:
                problems.append(f"missing {name}")
            elif tensors[name].shape != expected:
                problems.append(f"{name} has shape {tensors[name].shape}, expected {expected}")
            elif not jnp.issubdtype(tensors[name].dtype, jnp.floating):
                problems.append(f"{name} has dtype {tensors[name].dtype}, expected a floating one")
            else:
                tensor = _from_layout(layout, keys, np.asarray(tensors[name]), shape)
                layers.append(tensor if dtype is None else tensor.astype(dtype))
        if len(layers) == len(names):
            return np.stack(layers) if stacked else layers[0]

    params = jax.tree_util.tree_map_with_path(load, abstract_params)
    unknown = sorted(
        name
        for name in tensors.keys() - used
        if not any(fnmatchcase(name, pattern) for pattern in unused)
    )
    problems += [f"unknown {name}" for name in unknown]
    if problems:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(problems))
    return {**params, **initial}


def from_params(
    params: Mapping[str, Any], name_of: NameOf, *, layout: Layout = "torch"
) -> dict[str, np.ndarray]:
    """Makes named tensors from parameters, in their dtypes. It inverts `to_params`.

    Args:
      params: nested dicts of arrays.
      name_of, layout: as in `to_params`.

    Raises:
      ValueError: two parameters share a name (they are tied in the checkpoint) but differ.
    """
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys, leaf = _keys(path), np.asarray(leaf)
        stack = name_of(keys)
        layers = leaf if _is_stack(stack) else leaf[None]
        for name, layer in zip(_names(stack, leaf.shape), layers, strict=True):
            tensor = _to_layout(layout, keys, layer)
            if name in tensors and not np.array_equal(tensors[name], tensor):
                raise ValueError(
                    f"params: {'/'.join(keys)}: expected the values of the other parameter that is "
                    f"stored as {name}, got different ones"
                )
            tensors[name] = tensor
    return tensors


def _keys(path) -> tuple[str, ...]:
    return tuple(entry.key for entry in path)


def _is_stack(name: str) -> bool:
    return "{" in name


def _names(name: str, shape: tuple[int, ...]) -> list[str]:
    if not _is_stack(name):
        return [name]
    return [name.format(layer=i, even=2 * i, odd=2 * i + 1) for i in range(shape[0])]


def _to_layout(layout: Layout, keys: tuple[str, ...], leaf: np.ndarray) -> np.ndarray:
    if layout == "torch" and keys[-1] == "bias":
        return leaf.reshape(-1)
    if layout == "flax" or keys[-1] != "kernel":
        return leaf
    if leaf.ndim == 4:
        return leaf.transpose(3, 2, 0, 1)
    # Only the Dense after attention has several input axes, heads and head size.
    inputs = leaf.shape[:-1] if keys[-2] == "attention_output" else leaf.shape[:1]
    return leaf.reshape(math.prod(inputs), -1).T


def _from_layout(
    layout: Layout, keys: tuple[str, ...], tensor: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    if layout == "torch" and keys[-1] == "kernel":
        tensor = tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
    return tensor.reshape(shape)
