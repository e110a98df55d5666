"""The training step, a pure function that the trainer runs and the planner compiles.

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), steps=1000)
    state = init_state(params, optimizer, jnp.float16)
    step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0)
    state, metrics = step(state, frozen, batch)

Mixed precision follows Micikevicius et al. 2017 (arXiv:1710.03740): the model computes in 16 bits;
weights, their gradients, sums and norms are float32 by default. float16 scales the loss. A batch
whose gradients overflow halves the scale, and its gradients count as zeros in the mean over
accumulated batches. If all batches of a mean overflow, parameters and AdamW's state do not change.
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

#: `loss_fn(params, frozen, batch)` returns the mean loss, float32, and a pytree for `Metrics.aux`.
LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]]


class TrainState(struct.PyTreeNode):
    """The state that a training step updates."""

    params: Any  # the trained parameters: float32, or bfloat16 if master weights have 24 bits
    opt_state: Any  # the state of `make_optimizer`'s optimizer
    step: Int[Array, ""]  # int32, the number of batches seen, including skipped ones
    loss_scale: DynamicScale | None  # its `scale` multiplies the loss; for float16 only


class Metrics(struct.PyTreeNode):
    """The report of a training step."""

    loss: Float[Array, ""]  # float32, the mean over the batch
    grad_norm: Float[Array, ""]  # float32, the norm of all gradients; inf or NaN if they overflow
    skipped: Array  # bool, whether the gradients overflowed and therefore count as zeros
    aux: Any  # the second output of the loss function


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the learning rate falls to 0 after its linear warmup."""
    warmup: float = 0.1
    """The fraction of the steps in which the learning rate rises, 0 to 1."""
    weight_decay: float = 0.01
    """Weight decay of matrices (kernels, word embeddings, LoRA). Biases, norms and positions have
    none."""
    beta2: float = 0.999
    """AdamW's decay rate for the mean of squared gradients."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to this norm."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one optimizer step."""
    optimizer_state: Literal["float32", "8bit"] = "float32"
    """How AdamW's state is stored between steps."""
    master_weights: Literal["float32", "24bit"] = "float32"
    """24bit stores the trained parameters in bfloat16 and 8 more bits in the optimizer's state."""

    @property
    def param_dtype(self) -> jnp.dtype:
        """The dtype of the trained parameters."""
        return jnp.dtype("bfloat16" if self.master_weights == "24bit" else "float32")


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the optimizer's step, out of `steps`."""
    warmup = min(round(config.warmup * steps), steps - 1)
    rest = steps - warmup
    falling = {
        "linear": optax.linear_schedule(config.learning_rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, rest),
    }[config.schedule]
    # The first step's rate is above 0.
    rising = optax.linear_schedule(
        config.learning_rate / (warmup + 1), config.learning_rate, max(warmup, 1)
    )
    return optax.join_schedules([rising, falling], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Makes AdamW with a schedule of `steps` steps.

    It takes one step every `config.accumulate` calls (`optax.MultiSteps`).
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
    """Clips as `optax.clip_by_global_norm`, but by one product.

    XLA fuses the product into an update of 8-bit state.
    """

    def update(updates, state, params=None):
        factor = jnp.minimum(1, most / optax.tree.norm(updates))
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_matrix(path: Any, _: Any) -> bool:
    # The path into an NNX variable ends with an entry that has no key.
    name = [entry.key for entry in path if hasattr(entry, "key")][-1]
    return name in ("kernel", "embedding", "kernel_lora_a", "kernel_lora_b")


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
) -> TrainState:
    """Returns the state at step 0, with copies of the trained parameters.

    Args:
      params: the trained parameters.
      optimizer: from `make_optimizer`.
      dtype: the computation's dtype; float16 gets a loss scale.
      param_dtype: the parameters' dtype, see `OptimizerConfig`.
    """
    # The state needs copies, because a step that donates its state frees the arrays.
    params = jax.tree.map(lambda x: jnp.array(x, param_dtype), params)
    scale = None
    if jnp.dtype(dtype) == jnp.float16:
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**16))
    return TrainState(params, optimizer.init(params), jnp.int32(0), scale)


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]:
    """Returns `step(state, frozen, batch)`, which gives the next state and `Metrics`; not jitted.

    Only `loss_fn`'s first argument is differentiated. `frozen` gets no gradient; it is `{}` if
    nothing is frozen.
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
            # optax's `should_skip_update_fn` would not count the batch, unlike `step`.
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
