"""The training step: optimizer, loss, mixed precision, and the mesh.

Mixed precision follows arXiv:1710.03740: the model computes in 16 bits, and weights, their
gradients and sums are float32. A batch whose float16 gradients overflow is skipped.

Examples are divided over the mesh's axes "data" and "fsdp". Parameters and the optimizer's state
are divided over "fsdp" (arXiv:1910.02054) and "tensor" (arXiv:1909.08053: a layer's first Denses by
columns, its last by rows). XLA adds the collectives.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lora import combine

import lowmembp_jax as lm
from lowmembp_jax.models.workload import clip_by_norm
from lowmembp_jax.optimizers.compressed_state import CompressedState


def learning_rate(peak: float, steps: int, warmup: float = 0.1):
    """Returns the learning rate as a function of the step: it rises to `peak`, and falls to 0."""
    start = min(round(warmup * steps), steps - 1)
    falling = optax.linear_schedule(peak, 0.0, steps - start)
    # The first step's rate is above 0.
    rising = optax.linear_schedule(peak / (start + 1), peak, max(start, 1))
    return optax.join_schedules([rising, falling], [start])


def make_optimizer(
    rate: Any,
    *,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
    accumulate: int = 1,
    is_8bit: bool = False,
    master_bits: int | None = None,
) -> optax.GradientTransformation:
    """Makes AdamW (arXiv:1711.05101). It takes one step every `accumulate` calls.

    `master_bits`: the bits of `lm.master_weights`.
    """

    def is_matrix(path, _):
        # The path into an NNX variable ends with an entry that has no key.
        name = [entry.key for entry in path if hasattr(entry, "key")][-1]
        return name in ("kernel", "embedding", "kernel_lora_a", "kernel_lora_b")

    matrices = partial(jax.tree_util.tree_map_with_path, is_matrix)
    adamw = optax.adamw(rate, weight_decay=weight_decay, mask=matrices)
    adamw = lm.compress_state(adamw) if is_8bit else adamw
    optimizer = optax.chain(clip_by_norm(clip_norm), adamw)
    if master_bits is not None:
        optimizer = lm.master_weights(optimizer, bits=master_bits)
    if accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, accumulate).gradient_transformation()
    return optimizer


class TrainState(struct.PyTreeNode):
    """The state that a training step updates."""

    params: Any  # the trained parameters
    opt_state: Any
    step: jax.Array  # int32, the number of batches seen, including skipped ones
    loss_scale: DynamicScale | None  # for float16 only


def init_state(params: Any, optimizer: Any, dtype: Any, param_dtype: Any = jnp.float32):
    """Returns the state at step 0. `dtype` is the computation's."""
    # The state needs copies, because a step that donates its state frees the arrays.
    params = jax.tree.map(lambda x: jnp.array(x, param_dtype), params)
    scale = None
    if jnp.dtype(dtype) == jnp.float16:
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**16))
    return TrainState(params, optimizer.init(params), jnp.int32(0), scale)


class Metrics(NamedTuple):
    """The report of a training step."""

    loss: jax.Array  # the mean over the batch
    grad_norm: jax.Array  # the norm of all gradients
    skipped: jax.Array  # whether the gradients overflowed in float16
    loss_scale: jax.Array  # 1 without float16


def make_loss(task: str, model: nn.Module) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Returns `loss_fn(trained, frozen, batch)`: the mean loss, and sums over the batch.

    `trained` and `frozen` are the two parts from `lora.partition`, and `batch` is a `data.Batch`.
    The sums are the loss, the number of labels that are not -1, and the correct predictions. They
    are 0 for language models, which have no logits.
    """
    dtype = model.compute.dtype  # pyright: ignore[reportAttributeAccessIssue]

    def loss_fn(trained, frozen, batch):
        variables = {"params": combine(trained, frozen, dtype)}
        real = batch.labels >= 0
        count = real.sum().astype(jnp.float32)
        if task == "language-modelling":
            loss, correct = model.apply(variables, *batch.inputs, targets=batch.labels), 0.0
        else:
            logits = model.apply(variables, *batch.inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            loss = jnp.where(real, losses, 0).sum()
            correct = jnp.sum(logits.argmax(-1) == batch.labels)
        return loss / count, (loss, count, jnp.float32(correct))

    return loss_fn


def make_step(loss_fn: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """Returns `step(state, frozen, batch)`, which gives the next state and `Metrics`; not jitted.

    Only `loss_fn`'s first argument is differentiated.
    """

    def step(state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, Metrics]:
        scale, finite = state.loss_scale, jnp.bool_(True)
        if scale is None:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, _), grads = gradient(state.params, frozen, batch)
        else:
            gradient = scale.value_and_grad(loss_fn, has_aux=True)
            scale, finite, (loss, _), grads = gradient(state.params, frozen, batch)
        norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if scale is not None:
            keep = partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
            params, opt_state = keep(params, state.params), keep(opt_state, state.opt_state)
        metrics = Metrics(loss, norm, ~finite, jnp.float32(1) if scale is None else scale.scale)
        return TrainState(params, opt_state, state.step + 1, scale), metrics

    return step


AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
# Names of Denses, and the axis of their kernels that is divided over "tensor". It counts from the
# end, because stacked layers have one more axis in front.
_COLUMNS = {"query": -2, "key": -2, "value": -2, "intermediate": -1, "gate": -1, "up": -1}
_ROWS = {"attention_output": -3, "output": -2, "down": -2}


def make_mesh(axes: Sequence[str], devices: Sequence[jax.Device]) -> Mesh:
    """Makes a mesh of all devices from strings "axis=size". By default "data" has all devices."""
    sizes = dict(re.findall(rf"({'|'.join(AXES)})=([1-9]\d{{0,8}}) ", " ".join([*axes, ""])))
    shape = [int(sizes.get(name, 1)) for name in AXES] if axes else [len(devices), 1, 1]
    if len(sizes) != len(axes) or math.prod(shape) != len(devices):
        raise ValueError(
            f"--mesh: expected sizes of {', '.join(AXES)} with a product of {len(devices)}, the "
            f"number of devices, such as data={len(devices)}, got {' '.join(axes)!r}"
        )
    return Mesh(np.array(devices).reshape(shape), AXES)


def partition_spec(path: Any, leaf: Any, mesh: Mesh) -> PartitionSpec:
    """Returns the partition of a parameter, or of its optimizer state, from its names and shape.

    An axis of the mesh is used only if it divides a suitable axis of the array.
    """
    names = tuple(str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path)
    spec: list[str | None] = [None] * len(leaf.shape)
    axis = None
    for module, name in itertools.pairwise(names):
        if module in _COLUMNS:
            axis = dict.fromkeys(("kernel", "bias"), _COLUMNS[module]) | {"kernel_lora_b": -1}
            axis = axis.get(name)
        elif module in _ROWS:
            axis = {"kernel": _ROWS[module], "kernel_lora_a": -2}.get(name)
    if axis is not None and -axis <= len(spec) and not leaf.shape[axis] % mesh.shape["tensor"]:
        spec[axis] = "tensor"
    # A scan slices stacked layers along their first axis, so every device needs all of that axis.
    rest = range("layers" in names, len(spec))
    free = [i for i in rest if spec[i] is None and leaf.shape[i] % mesh.shape["fsdp"] == 0]
    if math.prod(leaf.shape) >= 2048 and free:
        spec[max(free, key=lambda i: leaf.shape[i])] = "fsdp"
    return PartitionSpec(*spec)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the `NamedSharding`s of parameters or of a `TrainState`."""

    def of(path, node):
        if not isinstance(node, CompressedState):
            return NamedSharding(mesh, partition_spec(path, node, mesh))
        # The scales of an array are divided as the array is.
        inner = shardings(node.inner_state, mesh)
        pairs = zip(node.scales, jax.tree.leaves(inner), strict=True)
        return CompressedState(inner, tuple(None if s is None else own for s, own in pairs))

    is_leaf = lambda x: isinstance(x, CompressedState)  # noqa: E731
    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_leaf)


def own_part(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Returns (index, count): this process's devices take slice `index` of `count` equal slices.

    Processes can share a slice, because "tensor" may span processes.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise ValueError(
            f"--batch-size / --accumulate: expected a multiple of {ways}, the devices that --mesh "
            f"divides it over, got {batch_size}"
        )
    rows = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
    slices = [index[0].indices(batch_size)[:2] for index in rows if index is not None]
    start, stop = min(slices)[0], max(slices)[1]
    return start // (stop - start), batch_size // (stop - start)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts a batch on the devices, from the slice that each process has (see `own_part`)."""
    place = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, BATCH))
    return jax.tree.map(lambda rows: place(np.asarray(rows)), batch)


def fit(sizes: Any, task: Any, tokens: int) -> Any:
    """Returns a new model's config with the data's numbers of classes, token ids and positions."""
    changes = {"num_labels": len(task.classes)} if task.classes else {}
    if task.vocab_size:
        changes["vocab_size"] = task.vocab_size
    if not task.classes:  # language models have no table of positions
        changes["max_position_embeddings"] = max(tokens, sizes.max_tokens)
    return dataclasses.replace(sizes, **changes)
