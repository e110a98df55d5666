"""The training step, a pure function: what the trainer runs and the planner compiles.

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), steps=1000)
    state = init_state(params, optimizer, jnp.float16)
    step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0)
    state, metrics = step(state, frozen, batch)

Mixed precision as in Micikevicius et al. 2017 (arXiv:1710.03740): the model computes in 16 bits;
weights, their gradients, sums and norms are float32 by default. float16 scales the loss. A batch
whose gradients overflow halves the scale, and its gradients count as zeros in the mean over
accumulated batches. Where no batch of a mean counts, parameters and AdamW's state stay as they are.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from jaxtyping import Array, Float, Int

import lowmembp_jax as lm

#: `loss_fn(params, frozen, batch)`: the mean loss, float32, and a pytree of more to report.
LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]]


class TrainState(struct.PyTreeNode):
    """What a training step changes."""

    params: Any  # the trained parameters: float32, or bfloat16 if master weights have 24 bits
    opt_state: Any  # of `make_optimizer`'s optimizer
    step: Int[Array, ""]  # int32, how many batches it has seen, skipped ones included
    loss_scale: DynamicScale | None  # the loss is multiplied by its `scale`; for float16 only


class Metrics(struct.PyTreeNode):
    """What a training step reports."""

    loss: Float[Array, ""]  # float32, the mean over the batch
    grad_norm: Float[Array, ""]  # float32, of all gradients; inf or NaN where they overflow
    skipped: Array  # bool, whether they overflowed, so that they count as zeros
    aux: Any  # what the loss function has beside the loss


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    learning_rate: float = 1e-3
    """At its peak."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the learning rate falls to 0, after it has risen linearly."""
    warmup: float = 0.1
    """The part of the steps in which it rises, 0 to 1."""
    weight_decay: float = 0.01
    """Of matrices: kernels, embeddings of words, LoRA. Not of biases, norms and positions."""
    beta2: float = 0.999
    """AdamW's mean of squares."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step of the optimizer."""
    optimizer_state: Literal["float32", "8bit"] = "float32"
    """How AdamW's state is stored between steps."""
    master_weights: Literal["float32", "24bit"] = "float32"
    """24bit: the trained parameters are bfloat16, and the optimizer's state has 8 more bits."""

    @property
    def param_dtype(self) -> jnp.dtype:
        """The dtype of the trained parameters."""
        return jnp.dtype("bfloat16" if self.master_weights == "24bit" else "float32")


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by the optimizer's step; `steps` are there in all."""
    warmup = min(round(config.warmup * steps), steps - 1)
    rest = steps - warmup
    falling = {
        "linear": optax.linear_schedule(config.learning_rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, rest),
    }[config.schedule]
    # From the first step on it is above 0.
    rising = optax.linear_schedule(
        config.learning_rate / (warmup + 1), config.learning_rate, max(warmup, 1)
    )
    return optax.join_schedules([rising, falling], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """AdamW for `steps` of it in all.

    With `config.accumulate`, one step of AdamW follows so many calls (`optax.MultiSteps`).
    """

    def matrices(params):
        return jax.tree_util.tree_map_with_path(_is_matrix, params)

    adamw = optax.adamw(
        learning_rate(config, steps),
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    if config.optimizer_state == "8bit":
        adamw = lm.compress_state(adamw)
    optimizer = optax.chain(_clip(config.clip_norm), adamw)
    if config.master_weights == "24bit":
        optimizer = lm.master_weights(optimizer)
    if config.accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, config.accumulate).gradient_transformation()
    return optax.with_extra_args_support(optimizer)


def _clip(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` by one product, which XLA fuses into an update of 8-bit state."""

    def update(updates, state, params=None):
        factor = jnp.minimum(1, most / optax.tree.norm(updates))
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_matrix(path: Any, _: Any) -> bool:
    # What is inside of an NNX variable has an entry without a key.
    name = [entry.key for entry in path if hasattr(entry, "key")][-1]
    return name in ("kernel", "embedding", "kernel_lora_a", "kernel_lora_b")


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
) -> TrainState:
    """The state at step 0, with copies of the trained parameters.

    `dtype` is of the computation; float16 gets a loss scale. `param_dtype` is of the parameters,
    see `OptimizerConfig`.
    """
    # A copy: steps take the memory of their state over.
    params = jax.tree.map(lambda x: jnp.array(x, param_dtype), params)
    scale = None
    if jnp.dtype(dtype) == jnp.float16:
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**16))
    return TrainState(params, optimizer.init(params), jnp.int32(0), scale)


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]:
    """`step(state, frozen, batch)` gives the next state and `Metrics`; not yet jitted.

    `loss_fn` is differentiated in its first argument only: `frozen`, `{}` where nothing is frozen,
    gets no gradient.
    """

    def step(state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale
        if scale is None:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, aux), grads = gradient(state.params, frozen, batch)
        else:
            gradient = scale.value_and_grad(loss_fn, has_aux=True)
            scale, finite, (loss, aux), grads = gradient(state.params, frozen, batch)
        norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
        if scale is not None:
            # optax's `should_skip_update_fn` would not count the batch, and so fall behind `step`.
            grads = jax.tree.map(lambda grad: jnp.where(finite, grad, 0), grads)
        # optax.MultiSteps multiplies numbers and booleans.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        skipped = jnp.bool_(False)
        if scale is not None:
            old, counts, skipped = state.opt_state, finite, ~finite
            if isinstance(old, optax.MultiStepsState):
                counts |= optax.tree.norm(old.acc_grads) > 0
                old = old._replace(mini_step=opt_state.mini_step)
            keep = partial(jax.tree.map, lambda new, old: jnp.where(counts, new, old))
            params, opt_state = keep(params, state.params), keep(opt_state, old)
        return TrainState(params, opt_state, state.step + 1, scale), Metrics(
            loss, norm, skipped, aux
        )

    return step
