"""`lm.compress_checkpoints`, and the same for every function that JAX differentiates."""

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.core import eval_jaxpr

from lowmembp_jax._contexts import is_exact, is_for_tpu
from lowmembp_jax._messages import users_line, warn
from lowmembp_jax.compression import StorageFormat, check_options, in_range, positions
from lowmembp_jax.compression._primitive import Input
from lowmembp_jax.compression._taken_over import Checkpoint, Settings, grouped, take_over
from lowmembp_jax.compression._traced_call import traced_call
from lowmembp_jax.nnx import is_module, on_trees


def compress_checkpoints(
    fun: Callable[..., Any] | None = None,
    *,
    params_argnums: int | Sequence[int] = 0,
    dtype: StorageFormat = "float8",
    policy: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Makes every `jax.checkpoint` that `fun` calls store its residuals in 8 bits.

        loss = lm.compress_checkpoints(loss)        # loss(params, batch)
        value, grads = jax.value_and_grad(loss)(params, batch)

    It reaches checkpoints of any framework: `jax.checkpoint` and `jax.remat` under every name, as a
    decorator, `nn.remat`, `nnx.remat`, `eqx.filter_checkpoint`. Each becomes `lm.compress` with its
    own policy. Nobody names the parameters of each checkpoint: an operand of a checkpoint is a
    parameter if it is computed from parameters of `fun` alone. What `fun` closes over, such as the
    batch, is data. Values do not change, and gradients have only the rounding error of the stored
    arrays.

    These checkpoints stay as they are: a checkpoint inside another one, one with a policy that
    offloads or with mutable arrays, one that reads parameters alone, one inside a function with a
    derivative of its own, and one that would not save fewer bytes, such as a checkpoint around a
    plain `lax.scan` (checkpoint the scan's body instead). Gradients that `fun` itself computes stay
    exact.

    `lm.patch(checkpoint=True)` does the same in a training step that you cannot edit, and lists the
    checkpoints.

    Args:
      fun: any function that JAX can differentiate. Arguments and results may be NNX modules or
        Equinox modules, and may hold values that are not arrays. Without it,
        `compress_checkpoints` is a decorator with arguments.
      params_argnums: positions of the arguments that hold parameters; `()` if there are none.
      dtype: the format in which residuals are stored, see `lm.compress`.
      policy: replaces the policies of all checkpoints, such as `lm.products_saveable`; None leaves
        each its own.

    Returns:
      A function of the same arguments.

    Warns:
      UserWarning: `fun` calls no checkpoint, or all of them are left alone for what they are.

    Raises:
      ValueError: `dtype` is not a format; `policy` offloads (this error comes when the function is
        differentiated); a position is out of range.
      TypeError: `fun` or `policy` is not callable; `fun` is a class or a Flax module; `fun` needs
        the values of its arguments, as under `jax.jit`.
    """
    if fun is None:
        return functools.partial(
            compress_checkpoints, params_argnums=params_argnums, dtype=dtype, policy=policy
        )
    name = "compress_checkpoints"
    formats = check_options(name, dtype, policy).formats
    params = positions(name, "params_argnums", params_argnums)
    if not callable(fun) or isinstance(fun, type | nn.Module | nnx.Module):
        raise TypeError(f"{name}: fun: expected a function, such as the loss, got {fun!r}")
    own = getattr(fun, "__name__", type(fun).__name__)
    warned = False

    def add(checkpoints):
        nonlocal warned
        if not (warned or any(one.saved for one in checkpoints)):
            warned = True
            why = "; ".join(grouped(checkpoints)) or f"{own} calls no jax.checkpoint"
            warn(f"{name}: nothing is stored in fewer bits: {why}")

    def transform(fun):
        call = _taking_over(fun, formats, policy, f"lm.{name}({own})", add)

        def run(args, kwargs):
            is_param = in_range(name, "params_argnums", params, args) if args or kwargs else set()
            return call(args, kwargs, is_param, set())

        return run

    of_arrays, of_modules = transform(fun), on_trees(fun, transform)

    @functools.wraps(fun)
    def taken(*args, **kwargs):
        nodes = jax.tree.leaves((args, kwargs), is_leaf=is_module)
        return (
            of_modules(*args, **kwargs) if any(map(is_module, nodes)) else of_arrays(args, kwargs)
        )

    return taken


def _taking_over(
    fun: Callable[..., Any],
    formats: Mapping[str | None, str | None],
    policy: Callable[..., Any] | None,
    owner: str,
    add: Callable[[tuple[Checkpoint, ...]], None],
    otherwise: Callable[[Exception], None] | None = None,
) -> Callable[..., Any]:
    """Takes the checkpoints of `fun` over; returns what `traced_call` returns.

    Args:
      add: gets the checkpoints of each call.
      otherwise: see `traced_call`.
    """

    def bind(jaxpr, values, is_param):
        if not is_exact():
            # What is not computed is in memory anyway.
            inputs = tuple(Input.PARAMETER if one else Input.KEPT for one in is_param)
            settings = Settings(tuple(formats.items()), policy, owner, is_for_tpu())
            new, _, found = take_over(jaxpr, inputs, settings)
            jaxpr = jaxpr if new is None else new
            add(found)
        return eval_jaxpr(jaxpr, (), *values)

    return traced_call(fun, bind, None, False, any_result=True, otherwise=otherwise)


def compressed_vjp(
    vjp: Callable[..., Any],
    formats: Mapping[str | None, str | None],
    add: Callable[[tuple[Checkpoint, ...]], None],
    fun: Callable[..., Any],
    *primals: Any,
    **kwargs: Any,
) -> Any:
    """Runs `jax.vjp` with the checkpoints of `fun` taken over; its primals are the parameters.

    A function that `jax.vjp` takes, but that cannot be traced first, is left alone.

    Args:
      vjp: the original `jax.vjp`.
      add: gets the checkpoints.
    """
    if not callable(fun):
        return vjp(fun, *primals, **kwargs)  # which raises JAX's error

    def left(error: Exception) -> None:
        """Names the innermost line of the user, and the error."""
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        line = users_line((frame.filename, frame.lineno or 0) for frame in frames)
        why = str(error).partition("\n")[0]
        add((Checkpoint("a differentiated function", line, "", left=f"not traced: {why}"),))

    call = _taking_over(fun, formats, None, "lm.patch(checkpoint=True)", add, otherwise=left)

    @functools.wraps(fun)
    def taken(*primals):
        return call(primals, {}, set(range(len(primals))), set())

    return vjp(taken, *primals, **kwargs)
