"""What `lm.patch` replaces and by what, and what it leaves alone.

A call of a function or norm of JAX or Flax is swapped here; `_function_bodies` and the interceptor
of `_context` bring it. A swapped norm keeps its fields, its name and its parameters.
"""

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from lowmembp_jax._arguments import real_array
from lowmembp_jax._flax_norms import FIELDS, check_norm
from lowmembp_jax.linen import MSLayerNorm, MSRMSNorm
from lowmembp_jax.nnx import apply_norm
from lowmembp_jax.operators.activations import gelu, silu
from lowmembp_jax.operators.norms import ms_layer_norm, ms_rms_norm
from lowmembp_jax.patching._settings import Settings

#: Takes the operator, the reason why the original runs (None if it is swapped), and then the plain
#: function of arrays, ours, and their arguments.
Seen = Callable[..., None]


class Replacement(NamedTuple):
    """What is replaced.

    Attributes:
      function: JAX's activation, or the `__call__` of NNX's norm, without its decorators.
      ours: our function of arrays.
      linen: Flax's linen norm, and ours.
    """

    function: Callable
    ours: Callable
    linen: tuple[type, type] | None = None


TABLE = {
    "gelu": Replacement(inspect.unwrap(jax.nn.gelu), gelu),
    "silu": Replacement(inspect.unwrap(jax.nn.silu), silu),  # `jax.nn.silu` is jitted
    "layer_norm": Replacement(
        inspect.unwrap(nnx.LayerNorm.__call__), ms_layer_norm, (nn.LayerNorm, MSLayerNorm)
    ),
    "rms_norm": Replacement(
        inspect.unwrap(nnx.RMSNorm.__call__), ms_rms_norm, (nn.RMSNorm, MSRMSNorm)
    ),
}
# The operator, Flax's linen norm and ours, by Flax's `__call__`, which a subclass may call.
_LINEN = {
    inspect.unwrap(vars(row.linen[0])["__call__"]): (op, *row.linen)
    for op, row in TABLE.items()
    if row.linen
}
# RMSNorms of transformers, and what they add to their weight.
_FOREIGN = {
    f"transformers.models.{name.lower()}.modeling_flax_{name.lower()}.Flax{name}{kind}": offset
    for name, kind, offset in (
        ("Gemma", "RMSNorm", 1), ("Llama", "RMSNorm", 0), ("LongT5", "LayerNorm", 0),
        ("Mistral", "RMSNorm", 0), ("T5", "LayerNorm", 0),
    )
}  # fmt: skip
#: Only activations have these words in their names.
_ACTIVATIONS = ("gelu", "silu", "swish", "mish")
_OTHER_NORMS = ("Batch", "Group", "Instance", "Spectral", "Weight")


def swap_activation(
    op: str,
    plain: Callable,
    seen: Seen,
    bits: int,
    kernels: Iterable[tuple[int, ...]],
    x: Any,
    *args: Any,
) -> Any:
    """Computes the activation of x in the way that saves the least, and calls `seen`.

    Args:
      kernels: shapes of the kernels of the Denses around the activation, `(in, out)` each.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # such as nnx.Param
        x = x.__jax_array__()
    aval: Any = jax.typeof(x)
    reason = None
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        reason = f"{aval.dtype} input"
    elif aval.weak_type:
        # Our result would be strongly typed, and would promote the arrays that it meets.
        reason = "weakly typed input, as Python numbers are"
    if reason:
        seen(op, reason)
        return plain(x, *args)
    if aval.ndim and is_gate(kernels, aval.shape[-1]):
        seen(op, "multiplied by another Dense: stays exact, and is recomputed from its input")
        return jax.checkpoint(lambda x: plain(x, *args), prevent_cse=False)(x)
    ours = partial(TABLE[op].ours, bits=bits)
    seen(op, None, lambda x: plain(x, *args), lambda x: ours(x, *args), x)
    return ours(x, *args)


def is_gate(kernels: Iterable[tuple[int, ...]], width: int) -> bool:
    """Tells from the kernels whether another Dense multiplies an activation of that width.

    It does if two Denses with the same input width make that width for each Dense that takes it,
    or if one Dense makes twice that width. The multiplication saves the activation's output, which
    compiled models recompute from the saved input. A code would not replace that input, so it
    would only add memory.
    """
    shapes = [(shape[0], math.prod(shape[1:])) for shape in kernels if len(shape) in (2, 3)]
    takes = [out for source, out in shapes if source == width]
    sources = [source for source, out in shapes if out == width]
    if not sources:
        is_twice = any(out == 2 * width for _, out in shapes)
        return is_twice and any(out != 2 * width for out in takes)
    return bool(takes) and any(sources.count(source) == 2 * len(takes) for source in sources)


def own_activations(module: nn.Module) -> dict[str, str]:
    """Activations that a module holds or is and that `lm.patch` cannot swap: name -> reason."""

    def is_activation(name):
        return any(part in name.lower() for part in _ACTIVATIONS)

    found = {}
    for value in vars(module).values():
        function = getattr(value, "func", value)  # of a partial
        if isinstance(function, types.FunctionType) and is_activation(function.__name__):
            name, whose = function.__name__, function.__module__
            if not whose.startswith(("jax.", "lowmembp_jax.")):
                found[name] = f"{whose}.{name} is a custom function"
    name = type(module).__name__
    is_ours = type(module).__module__.startswith("lowmembp_jax.")
    if is_activation(name) and not module.variables and not is_ours:
        found[name] = f"{class_name(module)} is a custom class"
    return found


def linen_norm(context: Any) -> str | None:
    """ "layer_norm" or "rms_norm" if a call runs the `__call__` of a norm that can be swapped."""
    original = context.orig_method.func
    return _LINEN.get(original, ("rms_norm" if _class_of(original) in _FOREIGN else None,))[0]


def _class_of(method: Callable) -> str:
    return f"{method.__module__}.{method.__qualname__}".removesuffix(".__call__")


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
        op = _op_of_name(type(module))
        if op is None or isinstance(module, nnx.LayerNorm | nnx.RMSNorm):
            continue
        if not any(isinstance(one, nnx.Module) for _, one in nnx.iter_children(module)):
            ours = {"layer_norm": "MSLayerNorm", "rms_norm": "MSRMSNorm"}[op]
            reason = f"has its own __call__; in NNX, write lm.nnx.{ours} instead"
            yield op, "/".join(map(str, path)), f"{class_name(module)} {reason}"


def class_name(module: nn.Module | nnx.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _op_of_name(cls: type) -> str | None:
    names = [base.__name__ for base in cls.__mro__]
    for ending, op in (("LayerNorm", "layer_norm"), ("Norm", "rms_norm")):
        if any(name.endswith(ending) and not name.startswith(_OTHER_NORMS) for name in names):
            return op
    return None


def swap_linen_norm(context: Any, seen: Seen, settings: Settings) -> None:
    """Swaps the function that a call of a norm runs. The call then calls `seen`.

    Flax makes a partial for each call, which runs after all interceptors have seen the call. This
    replaces the function of that partial.
    """
    original = context.orig_method.func
    swap = _linen_norm if original in _LINEN else _foreign_norm
    run = partial(swap, original, seen, settings)
    context.orig_method.__setstate__((run, context.orig_method.args, {}, None))


def _linen_norm(original, seen, settings, module, x, **mask):
    op, norm, ours = _LINEN[original]
    given = {f.name: getattr(module, f.name) for f in fields(norm) if f.name != "name"}
    given |= {"parent": None}
    plain = norm(**given)
    given |= {"dtype": settings.norm_dtype or module.dtype, "residual": settings.norm_residual}
    try:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(f"{x.dtype} input")
        swapped = ours(**given)
    except ValueError as reason:
        seen(op, str(reason))
        return original(module, x, **mask)
    unbound = swapped.clone()
    variables = {"params": dict(module.variables.get("params", {}))}
    seen(op, None, plain.apply, unbound.apply, variables, x)
    object.__setattr__(swapped, "param", module.param)
    return inspect.unwrap(ours.__call__)(swapped, x, **mask)


def _foreign_norm(original, seen, settings, module, x):
    dtype = settings.norm_dtype or jax.eval_shape(partial(original, module), x).dtype
    epsilon = module.eps if hasattr(module, "eps") else module.epsilon

    def ours(variables, x):
        scale = variables["params"]["weight"] + _FOREIGN[_class_of(original)]
        return ms_rms_norm(x, scale, epsilon=epsilon, dtype=dtype, residual=settings.norm_residual)

    variables = {"params": dict(module.variables["params"])}
    seen("rms_norm", None, module.clone(parent=None).apply, ours, variables, x)
    return ours(variables, x)


def swap_nnx_norm(
    op: str, plain: Callable, seen: Seen, settings: Settings, norm: Any, x, mask=None
) -> Any:
    """Runs the call of an `nnx.LayerNorm` or `nnx.RMSNorm`, and calls `seen`."""
    given = {name: getattr(norm, name) for name in (*FIELDS, "promote_dtype")}
    given |= {"dtype": settings.norm_dtype or norm.dtype, "residual": settings.norm_residual}
    ours, center = SimpleNamespace(**given, implementation=None), op == "layer_norm"
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
