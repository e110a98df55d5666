"""The training step: optimizer, loss, mixed precision, and the mesh.

Mixed precision follows arXiv:1710.03740: the model computes in 16 bits, and weights, their
gradients and sums are float32. A batch whose float16 gradients overflow is skipped.

Examples are divided over all devices. Parameters and the optimizer's state are divided over the
mesh's axis "fsdp" (arXiv:1910.02054). XLA adds the collectives.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lora import combine

import lowmembp_jax as lm
from lowmembp_jax.models.workload import clip_by_norm


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
    accumulate: int = 1,
    is_8bit: bool = False,
    master_bits: int | None = None,
) -> optax.GradientTransformation:
    """Makes AdamW (arXiv:1711.05101) with clipped gradients. `accumulate` calls make one step.

    `master_bits`: the bits of `lm.master_weights`.
    """

    def is_matrix(path, _):
        # The path into an NNX variable ends with an entry that has no key.
        name = [entry.key for entry in path if hasattr(entry, "key")][-1]
        return name in ("kernel", "embedding", "kernel_lora_a", "kernel_lora_b")

    matrices = partial(jax.tree_util.tree_map_with_path, is_matrix)
    adamw = optax.adamw(rate, weight_decay=weight_decay, mask=matrices)
    adamw = lm.compress_state(adamw) if is_8bit else adamw
    optimizer = optax.chain(clip_by_norm(1.0), adamw)
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


def evaluate(totals: Callable[[Any], Any], batches: Iterable[Any]) -> dict[str, float]:
    """Returns the mean loss and the accuracy; `totals(batch)` returns the sums of `make_loss`."""
    sums = [jax.device_get(totals(batch)) for batch in batches]
    loss, count, correct = np.sum(sums, axis=0, dtype=np.float64).tolist()
    return {"loss": loss / count, "accuracy": correct / count}


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
        return TrainState(params, opt_state, state.step + 1, scale), Metrics(loss, norm, ~finite)

    return step


def make_mesh(fsdp: int) -> Mesh:
    """Makes a mesh of all devices: parameters are divided over `fsdp`, and batches over all."""
    count = jax.device_count()
    if fsdp < 1 or count % fsdp:
        raise ValueError(
            f"--fsdp: expected a divisor of {count}, the number of devices, got {fsdp}"
        )
    return jax.make_mesh((count // fsdp, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


#: The partition of a batch.
BATCH = PartitionSpec(("data", "fsdp"))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the `NamedSharding`s of parameters or of a `TrainState`.

    The last axis that "fsdp" divides evenly is divided. It is not the array's last one, which has
    another size in the scales of 8-bit state. Small arrays are whole on every device.
    """

    def one(path, leaf):
        # A scan slices stacked layers along their first axis, so every device needs all of it.
        is_stack = any(getattr(entry, "key", None) == "layers" for entry in path)
        spec: list[str | None] = [None] * len(leaf.shape)
        for axis in reversed(range(is_stack, len(spec) - 1)):
            if math.prod(leaf.shape) >= 2048 and leaf.shape[axis] % mesh.shape["fsdp"] == 0:
                spec[axis] = "fsdp"
                break
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, tree)
