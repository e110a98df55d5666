"""Decides which norms `lm.patch` swaps, and runs the swapped ones.

The module keeps its fields, its name and its parameters. Only its `__call__` is replaced.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from lowmembp_jax._arguments import real_array
from lowmembp_jax._flax_norms import FIELDS, check_norm
from lowmembp_jax.linen import MSLayerNorm, MSRMSNorm
from lowmembp_jax.nnx import apply_norm
from lowmembp_jax.operators.norms import Residual, ms_layer_norm, ms_rms_norm
from lowmembp_jax.patching._recognized_norms import RecognizedNorm

#: Takes the operator, the reason why the original runs (None if it is swapped), and then the plain
#: function of arrays, ours, and their arguments.
Seen = Callable[..., None]

# Flax's norms, keyed by their `__call__`, which a subclass may call from its own.
_FLAX: dict[Callable, tuple[str, type, Any]] = {
    inspect.unwrap(nn.LayerNorm.__call__): ("layer_norm", nn.LayerNorm, MSLayerNorm),
    inspect.unwrap(nn.RMSNorm.__call__): ("rms_norm", nn.RMSNorm, MSRMSNorm),
}
_OTHERS = ("Batch", "Group", "Instance", "Spectral", "Weight")


def flax_norm(context: Any) -> str | None:
    """ "layer_norm" or "rms_norm" if a call runs the `__call__` of one of Flax's norms."""
    return _FLAX.get(context.orig_method.func, (None,))[0]


def named_norm(module: nn.Module) -> str | None:
    """ "layer_norm" or "rms_norm" by the name of the class or a base; None if it holds modules."""
    op = _op_of_name(type(module))
    if op is None or isinstance(module, MSLayerNorm | MSRMSNorm):
        return None
    held = module.variables.get("params", {}).values() if module.scope else [{}]
    return None if any(isinstance(one, Mapping) for one in held) else op


def own_nnx_norms(root: nnx.Module) -> Iterator[tuple[str, str, str]]:
    """Finds custom norms in an NNX model by their names: operator, path and reason.

    Flax has no interceptors for NNX modules. The first call of a custom norm runs before it could
    be swapped, so the report only names these norms.
    """
    for path, module in nnx.iter_modules(root):
        op, is_flax = _op_of_name(type(module)), isinstance(module, nnx.LayerNorm | nnx.RMSNorm)
        if (
            op
            and not is_flax
            and not any(isinstance(one, nnx.Module) for _, one in nnx.iter_children(module))
        ):
            whose = f"{type(module).__module__}.{type(module).__qualname__}"
            ours = {"layer_norm": "MSLayerNorm", "rms_norm": "MSRMSNorm"}[op]
            reason = f"{whose} has its own __call__; in NNX, write lm.nnx.{ours} instead"
            yield op, "/".join(map(str, path)), reason


def _op_of_name(cls: type) -> str | None:
    names = [base.__name__ for base in cls.__mro__]
    for ending, op in (("LayerNorm", "layer_norm"), ("Norm", "rms_norm")):
        if any(name.endswith(ending) and not name.startswith(_OTHERS) for name in names):
            return op
    return None


def swap_linen_norm(
    context: Any, known: RecognizedNorm | None, seen: Seen, dtype: Any, residual: Residual
) -> None:
    """If a module's call computes a norm, swaps the function that it runs. The call calls `seen`.

    Flax makes a partial for each call, which runs after all interceptors have seen the call. This
    replaces the function of that partial.

    Args:
      known: the recognized norm, if the module is not one of Flax's norms.
    """
    original = context.orig_method.func
    if original in _FLAX:
        run = partial(_flax, original, seen, dtype, residual)
    elif known is not None:
        run = partial(_recognized, known, seen, dtype, residual)
    else:
        return
    context.orig_method.__setstate__((run, context.orig_method.args, {}, None))


def _flax(original, seen, dtype, residual, module, x, **mask):
    op, norm, ours = _FLAX[original]
    given = {f.name: getattr(module, f.name) for f in fields(norm) if f.name != "name"}
    given |= {"parent": None}
    plain = norm(**given)
    try:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(f"{x.dtype} input")
        swapped = ours(**given | {"dtype": dtype or module.dtype, "residual": residual})
    except ValueError as reason:
        seen(op, str(reason))
        return original(module, x, **mask)
    unbound = swapped.clone()
    variables = {"params": dict(module.variables.get("params", {}))}
    seen(op, None, plain.apply, unbound.apply, variables, x)
    object.__setattr__(swapped, "param", module.param)
    return inspect.unwrap(ours.__call__)(swapped, x, **mask)


def _recognized(norm: RecognizedNorm, seen, dtype, residual, module, x):
    def ours(variables, x):
        params = variables["params"]
        scale = params[norm.scale] + norm.offset
        given = {"epsilon": norm.epsilon, "dtype": dtype or norm.dtype, "residual": residual}
        if norm.center:
            bias = None if norm.bias is None else params[norm.bias]
            return ms_layer_norm(x, scale, bias, **given)
        return ms_rms_norm(x, scale, **given)

    variables = {"params": dict(module.variables["params"])}
    op = "layer_norm" if norm.center else "rms_norm"
    seen(op, None, module.clone(parent=None).apply, ours, variables, x)
    return ours(variables, x)


def swap_nnx_norm(
    op: str, plain: Callable, seen: Seen, dtype: Any, residual: Residual, norm: Any, x, mask=None
) -> Any:
    """Runs the call of an `nnx.LayerNorm` or `nnx.RMSNorm`, and calls `seen`."""
    given = {name: getattr(norm, name) for name in (*FIELDS, "promote_dtype")}
    given |= {"dtype": dtype or norm.dtype, "residual": residual, "implementation": None}
    ours, center = SimpleNamespace(**given), op == "layer_norm"
    try:
        check_norm(ours)
        real_array(x)
    except (TypeError, ValueError) as reason:
        seen(op, str(reason))
        return plain(norm, x, mask=mask)
    graph, state = nnx.split(norm)

    def plain_of(state, x):
        return plain(nnx.merge(graph, state), x)

    def ours_of(state, x):
        return apply_norm(ours, nnx.merge(graph, state), x, None, center)

    seen(op, None, plain_of, ours_of, state, x)
    return apply_norm(ours, norm, x, mask, center)
