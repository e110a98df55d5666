"""Where the trainer's model comes from: a name or a checkpoint, fitted to the task."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.checkpoints import read_tensors, to_params
from lowmembp_examples.data.tasks import Task, TaskName
from lowmembp_examples.models import vit
from lowmembp_examples.models.bert_names import current_names
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.vit_npz import (
    UNUSED_WITH_NEW_HEAD,
    npz_config,
    npz_name,
    resize_positions,
)
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.models import FAMILIES, MODELS, Family


class Checkpoint(NamedTuple):
    """Tensors as a file has them."""

    path: Path
    tensors: dict[str, np.ndarray]
    is_npz: bool  # Google's, of a ViT


class Source(NamedTuple):
    """A model to begin with."""

    family: Family
    config: Any  # sizes, of the family's config class
    checkpoint: Checkpoint | None


def find_source(model: str | None, path: Path | None, task: TaskName | None) -> Source:
    """The model of that name, or of the checkpoint; without either the task's smallest.

    Args:
      model: a name of `MODELS`.
      path: a Hugging Face directory, or an `.npz` of Google's.
      task: which it shall be for; None for any.

    Raises:
      UsageError: no such model, one for another task, or a checkpoint that is not there, cannot be
        read, or is of none of the families.
    """
    if model is not None and path is not None:
        raise UsageError(f"--model {model} and --checkpoint {path}: expected only one of them")
    if path is None:
        if model is None:
            toys = {family.task: f"{family.name}-toy" for family in reversed(FAMILIES.values())}
            model = toys[task or "text-classification"]
        if model not in MODELS:
            raise UsageError(f"--model must be one of {', '.join(MODELS)}, got {model!r}")
        source = Source(*MODELS[model], None)
    else:
        source = _read(path)
    if task not in (None, source.family.task):
        given = f"--model {model}" if path is None else f"--checkpoint {path}"
        raise UsageError(f"{given} is for {source.family.task}, --data.task is {task}")
    return source


def _read(path: Path) -> Source:
    try:
        if path.suffix == ".npz":
            tensors = dict(np.load(path))
            heads = {} if "head/bias" in tensors else {"num_labels": 0}
            config = npz_config(tensors, **heads)
            return Source(FAMILIES["vit"], config, Checkpoint(path, tensors, True))
        kind = json.loads((path / "config.json").read_text()).get("model_type")
        if kind not in FAMILIES:
            raise UsageError(
                f"--checkpoint {path}: config.json has model_type {kind!r}, accepted are "
                f"{', '.join(FAMILIES)}"
            )
        config = FAMILIES[kind].config.from_json(path / "config.json")
        tensors = current_names(read_tensors(path))
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"--checkpoint {path}: {error}") from error
    return Source(FAMILIES[kind], config, Checkpoint(path, tensors, False))


def fit(source: Source, task: Task, length: int, image_size: int) -> Any:
    """The sizes of the model for a task: labels, token ids, image size.

    Args:
      source: from `find_source`. A checkpoint keeps its vocabulary.
      length: tokens a text.
      image_size: pixels of the images that the task's batches hold.

    Raises:
      UsageError: the checkpoint's vocabulary or positions do not reach.
    """
    changes = {}
    if task.classes:
        changes["num_labels"] = len(task.classes)
    if source.family.task == "image-classification":
        changes["image_size"] = image_size
        patch = source.config.patch_size
        if isinstance(source.config, vit.ViTConfig) and image_size % patch:
            raise UsageError(
                f"--data.image-size must be a multiple of {patch}, the model's patches, "
                f"got {image_size}"
            )
    elif source.checkpoint is None:
        changes["vocab_size"] = task.vocab_size
    elif task.vocab_size > source.config.vocab_size:
        raise UsageError(
            f"--data.tokenizer has {task.vocab_size} token ids, the checkpoint "
            f"{source.checkpoint.path} has {source.config.vocab_size}"
        )
    config = dataclasses.replace(source.config, **changes)
    if task.classes and length > getattr(config, "max_tokens", length):
        raise UsageError(
            f"--data.sequence-length must be at most {config.max_tokens}, the model's number of "
            f"positions, got {length}"
        )
    return config


def model_inputs(task: TaskName, length: int, image_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a model of the task takes, for one example."""
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return {
        "image-classification": (
            jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32),
        ),
        "text-classification": (ids, jax.ShapeDtypeStruct((1,), jnp.int32)),
        "language-modelling": (ids,),
    }[task]


def initial_params(
    source: Source, config: Any, inputs: tuple[Any, ...], key: jax.Array
) -> dict[str, Any]:
    """Parameters on the host, in the dtypes they have, of a model that is not merged.

    Args:
      source: from `find_source`.
      config: from `fit`.
      inputs: from `model_inputs`.
      key: draws all parameters, or where there is a checkpoint those of a new head.

    Raises:
      UsageError: names every tensor of the checkpoint that does not fit.
    """
    family, _, checkpoint = source
    model = family.build(config, Compute())
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)

    def draw(key):
        return model.init(key, *zeros)["params"]

    if checkpoint is None:
        return jax.device_get(jax.jit(draw)(key))
    abstract = jax.eval_shape(draw, key)
    module, tensors = family.module, checkpoint.tensors
    name_of = npz_name if checkpoint.is_npz else module.hugging_face_name
    unused, prefix = module.UNUSED, module.PREFIX
    heads = [name for name in family.head if _is_new(abstract, name, tensors, name_of, prefix)]
    # What is not returned is not computed.
    initial = jax.device_get(jax.jit(lambda key: {name: draw(key)[name] for name in heads})(key))
    if checkpoint.is_npz:
        unused, prefix = UNUSED_WITH_NEW_HEAD if heads else (), ""
    try:
        if family.model is vit.ViT:
            positions, side = name_of(("position_embeddings",)), config.image_size
            if positions not in tensors:
                positions = positions.removeprefix(prefix)
            resized = resize_positions(tensors[positions], side // config.patch_size)
            tensors = {**tensors, positions: resized}
        return to_params(
            tensors,
            abstract,
            name_of,
            unused,
            dtype=None,
            initial=initial,
            layout="flax" if checkpoint.is_npz else "torch",
            prefix=prefix,
        )
    except (ValueError, KeyError) as error:
        raise UsageError(f"--checkpoint {checkpoint.path}: {error}") from error


def _is_new(abstract: Any, head: str, tensors: Any, name_of: Any, prefix: str) -> bool:
    """Whether the checkpoint lacks a module, or has it for another number of labels."""
    bias = name_of((head, "bias"))
    found = tensors.get(bias, tensors.get(bias.removeprefix(prefix)))
    return found is None or found.shape != abstract[head]["bias"].shape
