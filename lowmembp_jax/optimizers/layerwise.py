"""Updates each layer inside the backward pass, so that all gradients never exist at once.

Source: LOMO (arXiv:2306.09782) updates each parameter as soon as its gradient is known. Here one
loop runs over stacked layers from the last to the first, or the layers of a list follow each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import partial_eval
from jaxtyping import Array, Float

from lowmembp_jax._arguments import check_function, check_transformation
from lowmembp_jax.compression import StorageFormat
from lowmembp_jax.compression.formats import Format, format_name


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


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["dtype"])
@dataclass
class _Stored:
    """An input of a layer in another format, and its own dtype."""

    arrays: tuple[Array, ...]
    dtype: Any


def update_in_backward(
    block: Callable[..., Float[Array, "*shape"]],
    optimizer: optax.GradientTransformation,
    *,
    dtype: StorageFormat = None,
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
    on. The results equal `jax.checkpoint` around each layer with an optax update afterwards. If the
    embedding is tied to the head, add its two gradients.
    Parameters and state change in place if `jax.jit` donates them.

    The optimizer sees one layer at a time, so its update cannot depend on all gradients. You cannot
    use clipping by the global norm, a loss scale that skips steps, or accumulation.

    Args:
      block: `block(layer_params, h, *constants)` returns the next `h`, of the same shape and dtype.
        `constants`, such as positions and masks, get no gradient.
      optimizer: any optax transformation that updates a parameter without the gradients of other
        parameters, such as `lm.master_weights(lm.compress_state(optax.adamw(1e-4)))`.
      dtype: the format of `lm.compress` in which the layers' inputs are stored, such as "float8".
        None stores them as they are, and the gradients are exact.

    Returns:
      `LayerwiseUpdates`. The argument `params` of its functions is a pytree of arrays
      `[layers, ...]`, as `nn.scan` and `jax.vmap(init)` make it, or a list of layers, whose
      parameters and `h` may differ in shape. Then state and inputs are lists as well.

    Raises:
      ValueError: `init` and `backward` raise it if the update of one parameter reads gradients or
        values of other parameters, or if the optimizer accumulates gradients. All three functions
        raise it if the arrays of `params` have no common number of layers, and `backward` if
        `state` or `inputs` have another number.
      TypeError: `block` is not callable, or `optimizer` is not a transformation. `forward` raises
        it if `block` changes the shape or dtype of `h`.
    """
    check_function(block, "update_in_backward: block")
    check_transformation(optimizer, "update_in_backward")
    storage = format_name(dtype, "update_in_backward: dtype")

    def stored(h):
        def encoded(x):
            format = Format.of(jax.typeof(x), storage, "update_in_backward")
            return x if format.storage is None else _Stored(format.encode(x), x.dtype)

        return jax.tree.map(encoded, h)

    def read(h):
        def decoded(x):
            if not isinstance(x, _Stored):
                return x
            return Format(storage, "update_in_backward").decode(x.arrays, x.dtype)

        return jax.tree.map(decoded, h, is_leaf=lambda x: isinstance(x, _Stored))

    def init(params):
        if isinstance(params, list):
            for layer in params:
                _check_optimizer(optimizer, _types(layer))
            return list(map(optimizer.init, params))
        _count(params)
        _check_optimizer(optimizer, _types(params, stacked=True))
        return jax.vmap(optimizer.init)(params)

    def forward(params, h, *constants):
        if isinstance(params, list):
            inputs = []
            for layer in params:
                inputs.append(stored(h))
                h = block(layer, h, *constants)
            return h, inputs
        _count(params)

        def layer(h, params):
            return block(params, h, *constants), stored(h)

        return lax.scan(layer, h, params)

    def updated(params, state, h, dh, constants):
        """Returns one layer's new parameters, its new state and the gradient of its input."""
        _, vjp = jax.vjp(lambda p, h: block(p, h, *constants), params, read(h))
        gradients, dh = vjp(dh)
        # Otherwise XLA may transpose the stacks of parameters, as whole arrays, for the update.
        gradients = jax.tree.map(_row_major, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, dh

    def backward_list(params, state, inputs, dh, constants):
        for name, given in (("state", state), ("inputs", inputs)):
            if not isinstance(given, list) or len(given) != len(params):
                raise ValueError(
                    f"update_in_backward: {name}: expected a list with {len(params)} entries, one "
                    f"for each layer, got {type(given).__name__}"
                )
        done = []
        for layer in reversed(list(zip(params, state, inputs, strict=True))):
            # The layer before waits until this one is updated, so that one gradient exists.
            *new, dh = lax.optimization_barrier(updated(*layer, dh, constants))
            done.insert(0, new)
        return [p for p, _ in done], [s for _, s in done], dh

    def backward(params, state, inputs, dh, *constants):
        if isinstance(params, list):
            return backward_list(params, state, inputs, dh, constants)
        count = _count(params)
        for name, tree in (("state", state), ("inputs", inputs)):
            if any(x.shape[:1] != (count,) for x in jax.tree.leaves(tree)):
                raise ValueError(
                    f"update_in_backward: {name}: expected arrays [{count}, ...], one entry for "
                    f"each layer, got {jax.tree.map(lambda x: x.shape, tree)}"
                )
        # The state may come from a checkpoint, without a call of `init`.
        _check_optimizer(optimizer, _types(params, stacked=True))

        def layer(step, carry):
            params, state, dh = carry
            index = count - 1 - step

            def at(tree):
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), tree)

            def put(stack, tree):
                return jax.tree.map(
                    lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), stack, tree
                )

            new, new_state, dh = updated(at(params), at(state), at(inputs), dh, constants)
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


def _row_major(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 2 else x


def _types(layer: Any, stacked: bool = False) -> Any:
    """The shapes and dtypes of a layer, or of one of stacked layers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype), layer)


def _check_optimizer(optimizer: optax.GradientTransformation, layer: Any) -> None:
    """Raises ValueError if the optimizer accumulates gradients or combines two parameters."""
    state = jax.eval_shape(optimizer.init, layer)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    if any(isinstance(x, optax.MultiStepsState) for x in nodes):
        raise ValueError(
            "update_in_backward: optimizer: expected an optimizer that updates in each step, got "
            "optax.MultiSteps, which accumulates all gradients"
        )
    try:
        closed = jax.make_jaxpr(optimizer.update)(layer, state, layer)
    except Exception as error:  # an optimizer may refuse missing arguments in its own way
        raise ValueError(
            "update_in_backward: optimizer: expected an optimizer that updates with gradients, "
            f"state and parameters alone: {error}"
        ) from error
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
