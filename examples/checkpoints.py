"""Hugging Face directories (config.json + model.safetensors) to parameter trees, and back.

A model says how its parameters are called there: `name_of(path)` is the tensor's name for a path
of the parameter tree. Where `nn.scan` stacked the layers, the name holds "{layer}"; the leading
axis of the parameter then runs over tensors whose names hold 0, 1, 2, ... in its place. Of layers
stacked in pairs one holds "{even}", for 0, 2, ..., the other "{odd}".

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
    """All tensors of a directory, under their names, in the dtypes they have (bfloat16 too).

    Args:
      directory: has model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
      DataError: neither is there, or a shard is not; a file is not in the format; a shard lacks a
        tensor that the index has in it, or is not in the directory.
    """
    directory = Path(directory)
    index = directory / _INDEX
    if (directory / _FILE).exists():
        return _read_file(directory / _FILE)
    if not index.exists():
        raise DataError(f"{directory} has neither {_FILE} nor {_INDEX}")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise DataError(f"{index}: expected an object weight_map")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or shard != Path(shard).name:
            found = reprlib.repr(shard)
            raise DataError(f"{index}: {name} must be in a file of this directory, found {found}")
    tensors = {}
    for shard in sorted(set(shard_of.values())):
        read = _read_file(directory / shard)
        if missing := sorted(n for n, of in shard_of.items() if of == shard and n not in read):
            raise DataError(f"{directory / shard}: lacks what {_INDEX} has in it: {missing}")
        tensors |= read
    return tensors


def _read_file(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(opened(path))
    except Exception as error:  # the library has an error of its own, and others for its dtypes
        raise DataError(f"{path}: not a readable safetensors file: {error}") from error


def write_tensors(
    directory: str | os.PathLike, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Makes the directory and writes config.json and, whole or not at all, model.safetensors."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # transformers refuses a file that does not say whose layout it has.
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
    """A parameter tree of NumPy arrays from named tensors.

    Args:
      tensors: name to array, from `read_tensors`.
      abstract_params: the model's parameters, nested dicts of arrays or `jax.ShapeDtypeStruct`s.
      name_of: see the module's docstring. Two parameters may have one name (tied weights).
      unused: patterns (`fnmatch`) of the names that the model has no use for, such as
        "pooler.*".
      dtype: of the parameters; None for what each tensor has.
      initial: name to subtree of `abstract_params`, taken as it is, such as a new `classifier`
        with another number of classes; what the checkpoint has in its place is passed over.
      layout: "torch": Dense kernels are [out, in], conv kernels [out, in, height, width], and
        (heads, head size) are one axis; "flax": as in the model.
      prefix: put before the names where none begins with it, as in the checkpoint of an encoder
        without a head.

    Raises:
      ValueError: names every tensor that is missing, unknown or of a wrong shape or dtype.
    """
    initial = initial or {}
    if unknown := sorted(initial.keys() - abstract_params.keys()):
        raise ValueError(f"initial: {unknown} are not in the model: {sorted(abstract_params)}")
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
    """Named tensors, in the dtypes of the parameters: the inverse of `to_params`.

    Args:
      params: nested dicts of arrays.
      name_of, layout: as for `to_params`.

    Raises:
      ValueError: two parameters of one name (tied in the checkpoint) have different values.
    """
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys, leaf = _keys(path), np.asarray(leaf)
        stack = name_of(keys)
        layers = leaf if _is_stack(stack) else leaf[None]
        for name, layer in zip(_names(stack, leaf.shape), layers, strict=True):
            tensor = _to_layout(layout, keys, layer)
            if name in tensors and not np.array_equal(tensors[name], tensor):
                raise ValueError(f"{'/'.join(keys)}: another parameter is {name} already")
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
    # Only the Dense after attention has several axes of inputs: heads and head size.
    inputs = leaf.shape[:-1] if keys[-2] == "attention_output" else leaf.shape[:1]
    return leaf.reshape(math.prod(inputs), -1).T


def _from_layout(
    layout: Layout, keys: tuple[str, ...], tensor: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    if layout == "torch" and keys[-1] == "kernel":
        tensor = tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
    return tensor.reshape(shape)
