"""Finds the trainer's model, by name or from a checkpoint, and fits it to the task."""

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.checkpoints import read_tensors, to_params
from lowmembp_examples.data.files import DataError, read_arrays, read_json
from lowmembp_examples.data.tasks import Task, TaskName
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_jax.models.bert_names import current_names
from lowmembp_jax.models.vit_npz import (
    UNUSED_WITH_NEW_HEAD,
    npz_config,
    npz_name,
    resize_positions,
)

from lowmembp_jax.models import vit
from lowmembp_jax.models.config_json import label_names
from lowmembp_jax.models.families import FAMILIES, MODELS, Family
from lowmembp_jax.models.layers import Compute


class Checkpoint(NamedTuple):
    """The tensors of a checkpoint's files."""

    path: Path
    tensors: dict[str, np.ndarray]
    is_npz: bool  # whether it is Google's .npz of a ViT
    head: tuple[str, ...]  # names of the classifier's outputs; empty without a classifier


class Source(NamedTuple):
    """A model to start from."""

    family: Family
    config: Any  # sizes, an instance of the family's config class
    checkpoint: Checkpoint | None


def find_source(
    model: str | None, path: Path | None, task: TaskName | None, new_head: bool = False
) -> Source:
    """Returns the model with that name, the checkpoint's, or without both the task's smallest.

    `new_head` leaves out the checkpoint's classifier.

    Raises:
      UsageError: an unknown model, a model for another task, or an unreadable checkpoint.
    """
    if model is not None and path is not None:
        raise UsageError(f"--model {model} and --checkpoint {path}: expected only one of them")
    if path is None:
        if model is None:
            toys = {family.task: f"{family.name}-toy" for family in reversed(FAMILIES.values())}
            model = toys[task or "text-classification"]
        if model not in MODELS:
            raise UsageError(f"--model: expected one of {', '.join(MODELS)}, got {model!r}")
        source = Source(*MODELS[model], None)
    else:
        try:
            source = _read(path, new_head)
        except ValueError as error:
            raise UsageError(f"--checkpoint {path}: {error}") from error
    if task not in (None, source.family.task):
        given = f"--model {model}" if path is None else f"--checkpoint {path}"
        raise UsageError(f"{given} is for {source.family.task}, --data.task is {task}")
    if new_head and (path is None or not source.family.head):
        raise UsageError("--new-head needs a --checkpoint of a classifier")
    return source


def _read(path: Path, new_head: bool) -> Source:
    is_npz, names = path.suffix == ".npz", ()
    if is_npz:
        tensors, family, name_of = read_arrays(path), FAMILIES["vit"], npz_name
        config = npz_config(tensors, **({} if "head/bias" in tensors else {"num_labels": 1}))
    else:
        given = read_json(path / "config.json")
        kind = given.get("model_type")
        if kind not in [*FAMILIES]:
            accepted = ", ".join(FAMILIES)
            found = reprlib.repr(kind)
            raise DataError(f"config.json: model_type: expected one of {accepted}, found {found}")
        family, name_of = FAMILIES[kind], FAMILIES[kind].module.hugging_face_name
        config, names = family.config.from_json(path / "config.json"), label_names(given)
        tensors = current_names(read_tensors(path))
        layers = sum(getattr(config, "depths", ())) or config.num_hidden_layers
        if layers > len(tensors):  # tracing a model with so many layers would take minutes
            raise DataError(
                f"config.json has {layers} layers, the files have only {len(tensors)} tensors"
            )
    head = ()
    if family.head:
        kernel, bias = (name_of(("classifier", leaf)) for leaf in ("kernel", "bias"))
        if new_head:
            tensors = {name: x for name, x in tensors.items() if name not in (kernel, bias)}
        elif bias in tensors:
            head = _default_names(tensors[bias].size)
        if head and names != _default_names(len(names)):
            if len(names) != len(head):
                raise DataError(
                    f"config.json: id2label: expected {len(head)} names, found {len(names)}"
                )
            head = names
    return Source(family, config, Checkpoint(path, tensors, is_npz, head))


def _default_names(count: int) -> tuple[str, ...]:
    """Returns the names that transformers gives to classes without names."""
    return tuple(f"LABEL_{i}" for i in range(count))


def match_classes(
    source: Source, say: Callable[[str], Any], names: Sequence[str]
) -> tuple[str, ...]:
    """Returns the task's classes in the order of the model's outputs.

    A checkpoint's head keeps its classes if it has all of `names`. A head without names (LABEL_0,
    ..., or Google's `.npz`) is used in the order of `names` if the numbers of classes match;
    otherwise a new head replaces it. `say` gets a line about the choice.

    Raises:
      UsageError: the head has other names.
    """
    if source.checkpoint is None:
        return tuple(names)
    head = source.checkpoint.head
    if head and all(head.count(name) == 1 for name in names):
        say(f"head: the checkpoint's, for {_listed(head)}")
        return head
    if head != _default_names(len(head)):
        raise UsageError(
            f"--checkpoint {source.checkpoint.path}: the head is for {_listed(head)}; the data "
            f"have {_listed(names)}. Rename the labels, or start a new head with --new-head"
        )
    if len(head) == len(names):
        say(f"head: the checkpoint's, which has no names; in order, it is for {_listed(names)}")
    else:
        other = f"; the checkpoint's is for {len(head)}, without names" if head else ""
        say(f"head: new, for {_listed(names)}{other}")
    return tuple(names)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown}, ... ({len(names)} in all)"


def fit(source: Source, task: Task, length: int, image_size: int) -> Any:
    """Returns the model's config with the task's number of labels, vocabulary and image size.

    Texts have `length` tokens. A checkpoint keeps its vocabulary.

    Raises:
      UsageError: the checkpoint's vocabulary is too small, the model has too few positions, or
        its patches do not divide the image.
    """
    changes = {}
    if task.classes:
        changes["num_labels"] = len(task.classes)
    if source.family.task == "image-classification":
        changes["image_size"] = image_size
        patch = source.config.patch_size
        if isinstance(source.config, vit.ViTConfig) and image_size % patch:
            raise UsageError(
                f"--data.image-size: expected a multiple of {patch}, the model's patches, "
                f"got {image_size}"
            )
    elif source.checkpoint is None:
        changes["vocab_size"] = task.vocab_size
        if not task.classes:  # LLaMA has no table of positions
            changes["max_position_embeddings"] = max(length, source.config.max_tokens)
    elif task.vocab_size > source.config.vocab_size:
        raise UsageError(
            f"--data.tokenizer has {task.vocab_size} token ids, the checkpoint "
            f"{source.checkpoint.path} has {source.config.vocab_size}"
        )
    config = dataclasses.replace(source.config, **changes)
    if length > getattr(config, "max_tokens", length):
        raise UsageError(
            f"--data.sequence-length: expected at most {config.max_tokens}, the model's number of "
            f"positions, got {length}"
        )
    return config


def model_inputs(task: TaskName, length: int, image_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes of a model's inputs for one example of the task."""
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
    """Returns the parameters of a model with unmerged norms, on the host, in their own dtypes.

    `key` draws all parameters, or only the parameters of a new head if there is a checkpoint.

    Raises:
      UsageError: tensors of the checkpoint do not fit; the message names each of them.
    """
    family, _, checkpoint = source
    model = family.build(config, Compute())

    def draw(key):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        return model.init(key, *zeros)["params"]

    if checkpoint is None:
        return jax.device_get(jax.jit(draw)(key))
    abstract = jax.eval_shape(draw, key)
    module, tensors = family.module, checkpoint.tensors
    name_of = npz_name if checkpoint.is_npz else module.hugging_face_name
    unused, prefix = module.UNUSED, module.PREFIX
    heads = [name for name in family.head if _is_new(abstract, name, tensors, name_of, prefix)]
    if checkpoint.is_npz:
        unused, prefix = UNUSED_WITH_NEW_HEAD if heads else (), ""
    if family.model is vit.ViT:
        name = name_of(("position_embeddings",))
        name = name if name in tensors else name.removeprefix(prefix)
        positions, sizes = tensors.get(name), source.config
        # `to_params` reports positions of another shape.
        if positions is not None and positions.shape == (
            *(1, 1 + (sizes.image_size // sizes.patch_size) ** 2, sizes.hidden_size),
        ):
            resized = resize_positions(
                np.asarray(positions), config.image_size // config.patch_size
            )
            tensors = {**tensors, name: resized}
    try:
        params = to_params(
            tensors,
            abstract,
            name_of,
            unused,
            dtype=None,
            initial={name: abstract[name] for name in heads},
            layout="flax" if checkpoint.is_npz else "torch",
            prefix=prefix,
        )
    except ValueError as error:
        raise UsageError(f"--checkpoint {checkpoint.path}: {error}") from error
    # XLA draws only the returned heads.
    return params | jax.device_get(
        jax.jit(lambda key: {name: draw(key)[name] for name in heads})(key)
    )


def _is_new(abstract: Any, head: str, tensors: Any, name_of: Any, prefix: str) -> bool:
    """Whether the checkpoint lacks the head's module, or has it for another number of labels."""
    bias = name_of((head, "bias"))
    found = tensors.get(bias, tensors.get(bias.removeprefix(prefix)))
    return found is None or found.shape != abstract[head]["bias"].shape
