"""Master weights of 24 bits, a bfloat16 parameter and 8 more in the state, or of 16 bits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Int8, Int32, UInt32

from lowmembp_jax._arguments import as_choice, check_transformation, hashed_bits
from lowmembp_jax._messages import warn


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      count: the number of steps so far.
      low: for each bfloat16 parameter the 8 bits of its master weight that it lacks;
        `optax.MaskedNode` for other parameters, and for all of them with 16 bits.
      inner_state: the state of the optimizer.
    """

    count: Int32[Array, ""]
    low: Any
    inner_state: optax.OptState


def _join(p: BFloat16[Array, "*n"], low: Int8[Array, "*n"]) -> Float32[Array, "*n"]:
    """Returns the master weight: the parameter's 16 bits plus `low` units of the 24th bit.

    The parameter may have been set since `low` was stored, as to 0 by a projection.
    """
    high = lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.int32) << 8
    low = jnp.maximum(low.astype(jnp.int32), -(high & 0x7FFFFF))
    master = lax.bitcast_convert_type((high + low).astype(jnp.uint32) << 8, jnp.float32)
    return jnp.where(jnp.isfinite(p), master, p.astype(jnp.float32))


def _split(
    p: BFloat16[Array, "*n"], master: Float32[Array, "*n"], count: Int32[Array, ""], dtype: Any
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
    """Returns the update that makes `p` the rounded master weight, and the bits that `p` lacks.

    The master weight is first rounded up or down at random to 24 bits, so that its mean is right.
    Rounded to nearest, every update of less than half a unit would be lost.
    """
    bits = _rounded(master, count, 24)
    update, after = _update(p, _from_bits((bits + 128) >> 8, master), dtype)
    high = lax.bitcast_convert_type(after, jnp.uint16).astype(jnp.int32) << 8
    low = jnp.clip(bits.astype(jnp.int32) - high, -128, 127).astype(jnp.int8)
    return update, jnp.where(jnp.isfinite(master), low, 0)


def _update(
    p: BFloat16[Array, "*n"], to: BFloat16[Array, "*n"], dtype: Any
) -> tuple[Float[Array, "*n"], BFloat16[Array, "*n"]]:
    """Returns the update in `dtype` that moves `p` to another number, and the number it reaches.

    bfloat16 has the difference exactly if the number changes by less than a factor of 2. Otherwise
    the update is rounded to its 8 bits of mantissa. In float32 it is exact, unless the new number
    is 2^16 times smaller than `p`.
    """
    info = jnp.finfo(dtype)
    update = to.astype(jnp.float32) - p.astype(jnp.float32)
    if info.bits < 32:  # a cast alone may be left out by XLA, which allows excess precision
        update = lax.reduce_precision(update, info.nexp, info.nmant)
    return update.astype(dtype), (p.astype(jnp.float32) + update).astype(jnp.bfloat16)


def _rounded(
    master: Float32[Array, "*n"], count: Int32[Array, ""], bits: int
) -> UInt32[Array, "*n"]:
    """Returns the upper bits of a number that is rounded up or down at random to them.

    The random bits are a hash of the value, the step and the place, so they do not depend on the
    mesh, and a resumed run has the same.
    """
    lost = 32 - bits
    dropped = hashed_bits(master, count) >> (32 - lost)
    return (lax.bitcast_convert_type(master, jnp.uint32) + dropped) >> lost


def _from_bits(bits: UInt32[Array, "*n"], master: Float32[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """Returns the number with these 16 bits, and NaN where the master weight is NaN."""
    number = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(master), master.astype(jnp.bfloat16), number)


@functools.cache
def _rounds_again() -> bool:
    """Whether `optax.apply_updates` casts an update before it adds it."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        p, u = jnp.asarray(1, jnp.bfloat16), jnp.asarray(-1.99609375, jnp.float32)
        added: Any = optax.apply_updates(p, u)
        return float(added) != -0.99609375


def _is_short(p: Any) -> bool:
    return jnp.result_type(p) == jnp.bfloat16


def master_weights(
    optimizer: optax.GradientTransformation, *, bits: int = 24
) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 parameters with master weights of 24 or 16 bits.

        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        optimizer = lm.master_weights(lm.compress_state(optax.adamw(1e-4)))
        state = jax.jit(optimizer.init)(params)
        ...
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    A master weight has the sign, the exponent and 15 bits of the mantissa of a float32 number. Its
    upper 16 bits, rounded to nearest, are the parameter, and the state has the other 8. So no
    float32 copy exists. A parameter takes 3 bytes instead of 6 for a float32 master weight with a
    bfloat16 copy. `optax.apply_updates` returns the rounded master weight. The optimizer gets
    gradients and parameters in float32. Rounding at random preserves the mean of updates that are
    smaller than the 24 bits resolve.

    Updates have the dtype of the gradients, so `optax.apply_if_finite` and other transformations
    that skip a step take them. A bfloat16 update moves a parameter exactly if the parameter changes
    by less than a factor of 2. Otherwise the update itself is rounded to bfloat16 in this step;
    with float32 gradients it is exact. Nothing may change the updates afterwards, so put this
    transformation last in a chain.

    With 16 bits the parameter is the master weight. Each update is rounded up or down at random to
    bfloat16, so that its mean is right (Gupta et al. 2015, arXiv:1502.02551). A parameter takes 2
    bytes, and the state has only the number of steps.

    The optimizer updates parameters of other dtypes as usual.

    Args:
      optimizer: any optax transformation.
      bits: 24 or 16.

    Returns:
      A transformation whose updates have the dtypes of the gradients.

    Warns:
      UserWarning: `init` gets no bfloat16 parameter, or this version of `optax.apply_updates` would
        round the parameters again.

    Raises:
      TypeError: `optimizer` is not a transformation; `update` gets a state that is not from `init`.
      ValueError: `bits` is not 24 or 16; `update` is called without `params`, or with a state of
        the other number of bits.
    """
    bits = as_choice(bits, "master_weights: bits", (24, 16))
    check_transformation(optimizer, "master_weights")
    inner = optax.with_extra_args_support(optimizer)

    def is_split(p):
        return bits == 24 and _is_short(p)

    def wide(tree, params):
        return jax.tree.map(lambda p, x: x.astype(jnp.float32) if _is_short(p) else x, params, tree)

    def init(params):
        leaves = jax.tree.leaves(params)
        if leaves and not any(map(_is_short, leaves)):
            warn(
                f"master_weights: params: no parameter is bfloat16, so nothing is stored in {bits} "
                f"bits; cast the parameters first"
            )
        if _rounds_again():
            warn("master_weights: optax.apply_updates rounds updates: add them in float32 instead")
        low = jax.tree.map(
            lambda p: jnp.zeros_like(p, jnp.int8) if is_split(p) else optax.MaskedNode(), params
        )
        return MasterWeightsState(jnp.zeros([], jnp.int32), low, inner.init(wide(params, params)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("master_weights: params: expected the parameters, got None")
        if not isinstance(state, MasterWeightsState):
            raise TypeError(
                f"master_weights: state: expected the state that init gives, got "
                f"{type(state).__name__}"
            )
        if any(map(is_split, jax.tree.leaves(params))) != bool(jax.tree.leaves(state.low)):
            raise ValueError(
                f"master_weights: state: expected the state of master weights of {bits} bits, got "
                f"another one's"
            )
        dtypes = [x.dtype for x in jax.tree.leaves(updates)]
        updates = jax.tree.map(lax.optimization_barrier, updates)
        masters = jax.tree.map(
            lambda p, low: _join(p, low) if is_split(p) else p, params, state.low
        )
        masters = wide(masters, params)
        updates, inner_state = inner.update(
            wide(updates, params), state.inner_state, masters, **extra
        )

        def split(p, master, u, dtype):
            if is_split(p):
                return _split(p, master + u, state.count, dtype)
            if _is_short(p):
                master += u
                near = _from_bits(_rounded(master, state.count, 16), master)
                u, _ = _update(p, near, dtype)
            return u, optax.MaskedNode()

        leaves, tree = jax.tree.flatten(params)
        others = tree.flatten_up_to(masters), tree.flatten_up_to(updates)
        pairs = list(map(split, leaves, *others, dtypes))
        updates, low = (tree.unflatten(pair[i] for pair in pairs) for i in (0, 1))
        return updates, MasterWeightsState(state.count + 1, low, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
