"""Updates each layer inside the backward pass, so that all gradients never exist at once.

Source: LOMO (arXiv:2306.09782) updates each parameter as soon as its gradient is known. Here the
layers are stacked, and one loop runs over them from the last to the first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax.interpreters import partial_eval
from jaxtyping import Array, Float


class LayerwiseUpdates(NamedTuple):
    """Three functions for stacked layers, see `update_in_backward`.

    Attributes:
      init: `state = init(params)`.
      forward: `h, inputs = forward(params, h, *constants)`: the output of the last layer, and the
        inputs of all layers, stacked.
      backward: `params, state, dh = backward(params, state, inputs, dh, *constants)`: the updated
        layers, and the gradient of the first layer's input.
    """

    init: Callable[[Any], Any]
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, Any, Any]]


def update_in_backward(
    block: Callable[..., Float[Array, "*shape"]], optimizer: optax.GradientTransformation
) -> LayerwiseUpdates:
    """Updates each layer inside the backward pass, so that only one layer's gradient exists.

        layers = lm.update_in_backward(block, optimizer)
        state = jax.jit(layers.init)(params["layers"])

        @partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, state, batch):
            h, embed_vjp = jax.vjp(lambda p: embed(p, batch), params["embed"])
            h, inputs = layers.forward(params["layers"], h)
            loss, head_vjp = jax.vjp(lambda p, h: head_loss(p, h, batch), params["head"], h)
            d_head, dh = head_vjp(jnp.ones_like(loss))
            stack, state, dh = layers.backward(params["layers"], state, inputs, dh)
            (d_embed,) = embed_vjp(dh)
            ...

    The forward pass saves the input of each layer. The backward pass goes through the layers from
    the last to the first. It recomputes one layer, and applies the optimizer to it before it goes
    on. The results equal `jax.checkpoint` around each layer with an optax update afterwards.
    Parameters and state change in place if `jax.jit` donates them.

    The optimizer sees one layer at a time, so its update cannot depend on all gradients. You cannot
    use clipping by the global norm, a loss scale that skips steps, or accumulation.

    Args:
      block: `block(layer_params, h, *constants)` returns the next `h`, of the same shape and dtype.
        `constants`, such as positions and masks, get no gradient.
      optimizer: any optax transformation that updates a parameter without the gradients of other
        parameters, such as `lm.master_weights(lm.compress_state(optax.adamw(1e-4)))`.

    Returns:
      `LayerwiseUpdates`. The argument `params` of its functions is a pytree of arrays
      `[layers, ...]`, as `nn.scan` and `jax.vmap(init)` make it.

    Raises:
      ValueError: `init` and `backward` raise it if the update of one parameter reads gradients or
        values of other parameters, or if the optimizer accumulates gradients. All three functions
        raise it if the arrays of `params` have no common number of layers, and `backward` if
        `state` or `inputs` have another number.
      TypeError: `block` is not callable, or `optimizer` is not a transformation. `forward` raises
        it if `block` changes the shape or dtype of `h`.
    """
    if not callable(block):
        raise TypeError(f"update_in_backward: block: expected a function, got {block!r}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"update_in_backward: optimizer: expected an optax.GradientTransformation, got "
            f"{optimizer!r}"
        )

    def init(params):
        _count(params)
        _check_optimizer(optimizer, params)
        return jax.vmap(optimizer.init)(params)

    def forward(params, h, *constants):
        _count(params)

        def layer(h, params):
            return block(params, h, *constants), h

        return lax.scan(layer, h, params)

    def backward(params, state, inputs, dh, *constants):
        count = _count(params)
        for name, tree in (("state", state), ("inputs", inputs)):
            if any(x.shape[:1] != (count,) for x in jax.tree.leaves(tree)):
                raise ValueError(
                    f"update_in_backward: {name}: expected arrays [{count}, ...], one entry for "
                    f"each layer, got {jax.tree.map(lambda x: x.shape, tree)}"
                )
        # The state may come from a checkpoint, without a call of `init`.
        _check_optimizer(optimizer, params)

        def layer(step, carry):
            params, state, dh = carry
            index = count - 1 - step

            def at(tree):
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), tree)

            def put(stack, tree):
                return jax.tree.map(
                    lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), stack, tree
                )

            here, state_here = at(params), at(state)
            _, vjp = jax.vjp(lambda p, h: block(p, h, *constants), here, at(inputs))
            gradients, dh = vjp(dh)
            updates, new_state = optimizer.update(gradients, state_here, here)
            new = optax.apply_updates(here, updates)
            return put(params, new), put(state, new_state), dh

        return lax.fori_loop(0, count, layer, (params, state, dh))

    return LayerwiseUpdates(init, forward, backward)


def _count(params: Any) -> int:
    """Returns the number of layers."""
    sizes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(params)}
    if len(sizes) != 1 or 0 in sizes:
        shapes = sorted({str(x.shape) for x in jax.tree.leaves(params)})
        raise ValueError(
            "update_in_backward: params: expected arrays [layers, ...] with one number of layers, "
            f"got {', '.join(shapes) or 'no array'}"
        )
    return sizes.pop()


def _check_optimizer(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Raises ValueError if the optimizer accumulates gradients or combines two parameters."""
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    state = jax.eval_shape(optimizer.init, layer)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    if any(isinstance(x, optax.MultiStepsState) for x in nodes):
        raise ValueError(
            "update_in_backward: optimizer: expected an optimizer that updates in each step, got "
            "optax.MultiSteps, which accumulates all gradients"
        )
    closed = jax.make_jaxpr(optimizer.update)(layer, state, layer)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(layer)]
    outputs = len(closed.jaxpr.outvars)
    for output in range(outputs):
        wanted = [number == output for number in range(outputs)]
        _, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
        # Gradients are the first inputs, and parameters the last.
        ends = zip(names, used[: len(names)], used[len(used) - len(names) :], strict=True)
        read = [name for name, *is_used in ends if any(is_used)]
        if len(read) > 1:
            raise ValueError(
                "update_in_backward: optimizer: expected an optimizer that updates each parameter "
                "from its own gradient and value, got an optimizer that combines "
                f"{', '.join(read)}, as clipping by the global norm does"
            )
