"""Exports a trained model to a Hugging Face directory, with LoRA and norms merged as needed."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax.traverse_util import flatten_dict, unflatten_dict
from lowmembp_examples.checkpoints import from_params, write_tensors
from lowmembp_examples.trainer.errors import UsageError

import lowmembp_jax as lm
from lowmembp_jax.models.families import Family
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.swin_checkpoint import buffers

Params = dict[str, Any]


def export(
    directory: Path,
    family: Family,
    config: Any,
    params: Params,
    *,
    merged: bool,
    lora_scale: float,
    classes: tuple[str, ...],
    dtype: Any,
    inputs: tuple[Any, ...],
    tokenizer: str | None = None,
    run: str = "",
) -> None:
    """Writes a Hugging Face directory.

    Args:
      params: all parameters of the model, on the host, with LoRA and NF4 as `lora.add_lora` makes
        them.
      merged: whether norms are merged into Denses.
      tokenizer: the content of tokenizer.json, or None to write none.
      run: the run's hash, for config.json. Only a run with the same hash may write here again.

    Raises:
      UsageError: a norm that is merged and kept, as in BERT, has a scale of 0.
    """
    params = _fold_lora(params, lora_scale)
    if merged:
        config, params = unmerge(family, config, params, inputs)
    tensors = from_params(params, family.module.hugging_face_name)
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    if family.name == "swin":
        tensors |= buffers(config)
    labels = {}
    if classes:
        numbers = {name: number for number, name in enumerate(classes)}
        labels = {"id2label": dict(enumerate(classes)), "label2id": numbers}
    write_tensors(directory, tensors, config.to_json() | labels | {"run": run})
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def _fold_lora(params: Params, scale: float) -> Params:
    """Replaces W, A and B by W + scale A B, in float32."""
    leaves = flatten_dict(params)
    folded = {}
    for path, leaf in leaves.items():
        if path[-1].endswith(("_lora_a", "_lora_b")):
            continue
        array = leaf
        if hasattr(leaf, "how"):  # NF4; scanned layers are stacked
            dequantize = jax.vmap(qwix.dequantize) if "layers" in path else qwix.dequantize
            array = dequantize(leaf.array)
        array = np.asarray(array).astype(np.float32)
        names = [(*path[:-1], f"{path[-1]}_lora_{part}") for part in "ab"]
        if names[0] in leaves:
            a, b = (np.asarray(leaves[name]).astype(np.float32) for name in names)
            array = array + scale * (a @ b).reshape(array.shape)
        folded[path] = array
    return unflatten_dict(folded)


def unmerge(
    family: Family, config: Any, params: Params, inputs: tuple[Any, ...]
) -> tuple[Any, Params]:
    """Returns the config and the parameters of the same function in a model with unmerged norms.

    Norms get a scale of 1 and a bias of 0. A norm that the rules merge and keep retains its scale
    and bias, and the Denses lose them. A bias that a Dense has only because of merging goes back
    into the norm: (b W^+) W.
    """
    if not getattr(config, "qkv_bias", True):
        config = type(config)(**vars(config) | {"qkv_bias": True})
    model = family.build(config, Compute())
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    abstract = jax.eval_shape(model.init, jax.random.key(0), *zeros)["params"]
    expected = flatten_dict(abstract)
    if kept := [rule for rule in family.norm_rules(config) if rule.keep]:
        # (y s + b) W + c is merged to y (s W) + (b W + c): merging 1 / s and -b / s undoes it.
        leaves = flatten_dict(params)
        scales = {path: leaf for path, leaf in leaves.items() if path[-1] == "scale"}
        inverse = dict(leaves)
        for path, scale in scales.items():
            if not scale.all():
                raise UsageError(f"--export: the scale of {'/'.join(path[:-1])} has become 0")
            bias = (*path[:-1], "bias")
            inverse |= {path: 1 / scale, bias: -leaves[bias] / scale}
        undone = flatten_dict(lm.merge_norm_affine(unflatten_dict(inverse), kept))
        norms = {path: leaf for path, leaf in leaves.items() if (*path[:-1], "scale") in scales}
        params = unflatten_dict(undone | norms)
    leaves = flatten_dict(params)
    for path in expected.keys() - leaves.keys():
        full = np.ones if path[-1] == "scale" else np.zeros
        leaves[path] = full(expected[path].shape, np.float32)
    for path in leaves.keys() - expected.keys():
        bias, kernel = leaves.pop(path), leaves[(*path[:-1], "kernel")]
        # This is Swin's patch merging only. Its Dense has twice as many inputs as outputs.
        norm = (*path[:-2], "merging_norm", "bias")
        leaves[norm] = np.linalg.lstsq(kernel.T, bias, rcond=None)[0]
    return config, unflatten_dict(leaves)
