"""The private parts of JAX that the library uses, and why. Tests cover all of them."""

import gc
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp

# `jax.experimental.checkify` has no public way to add the rule of a primitive.
from jax._src import checkify

# The traces around the current code: `lm.patch` must not round what is differentiated again.
from jax._src import core as core_internals

# JAX lowers a callback only for the GPUs of this process, which may have none.
from jax._src.callback import io_callback_p, pure_callback_p

# A kernel does not say along which axes of the mesh its results differ. A shard_map that checks
# this must call it unchecked.
from jax._src.config import _check_vma as check_vma  # noqa: F401
from jax._src.core import NamedAxisEffect
from jax._src.debugging import debug_callback_p, debug_print_p

# JAX searches only jaxprs for primitives that need their devices for lowering. A primitive that is
# lowered from a Python function must register here.
from jax._src.dispatch import prim_requires_devices_during_lowering  # noqa: F401
from jax._src.interpreters import ad, batching, partial_eval

# The rules of `jax.linear_transpose` that JAX uses for `jax.checkpoint`.
from jax._src.interpreters.ad import fancy_transposes  # noqa: F401
from jax._src.interpreters.mlir import LoweringParameters
from jax._src.pjit import _cpp_pjit
from jax._src.state.types import AbstractRef

# Caches that `jax.clear_caches` empties; the second holds its first argument weakly.
from jax._src.util import cache, weakref_lru_cache  # noqa: F401
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

#: Patterns of JAX's files in tracebacks. The planner names the user's line that called such a
#: file, and the public function of JAX that it called.
SOURCE = "/jax/_src/"
WHOLE = rf"{SOURCE}(nn|cudnn|scipy|image)/|/jax/experimental/pallas/"
FUNCTIONS = rf"{SOURCE}(numpy/|lax/(?!control_flow)|random)"


def varying(*arrays: Any) -> frozenset[str]:
    """The axes of the mesh along which at least one array or type differs, inside shard_map.

    A custom VJP must sum the gradient of a parameter over the axes along which only x differs.
    """
    types = (a if isinstance(a, ShapedArray) else jax.typeof(a) for a in arrays)
    return frozenset().union(*(type.manual_axis_type.varying for type in types))


def operation(eqn: Any) -> str:
    """The name of an equation's primitive, or of the JAX function that it calls.

    JAX 0.12's high-level primitives share one primitive. Functions of `jax.nn` and `jax.lax` such
    as `logaddexp` are custom JVPs. A custom JVP in other code has the primitive's name.
    """
    if "_prim" in eqn.params:
        name = type(eqn.params["_prim"]).__name__
        return "name" if name == "CheckpointName" else name  # under `jax_remat3`
    if eqn.primitive.name == "custom_jvp_call":
        name, _, file = eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info.partition(" at ")
        return name if SOURCE in file else eqn.primitive.name
    return eqn.primitive.name


def is_reference(atom: Any) -> bool:
    """Whether a variable or a literal is a mutable array (`jax.new_ref`)."""
    return isinstance(atom.aval, AbstractRef)


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that an equation gives its operand with `checkpoint_name`, or None."""
    if operation(eqn) != "name":
        return None
    return eqn.params["_prim"].name if "_prim" in eqn.params else eqn.params["name"]


def batched_jaxpr(jaxpr: Any, axis_data: Any, dims: Any) -> tuple[Any, list[bool]]:
    """Batches a jaxpr along axis 0: returns it closed, and which of its results are batched.

    Args:
      axis_data: the axis, as a rule of `batching.fancy_primitive_batchers` gets it.
      dims: the batched axis of each input; None for an input without one.
    """
    closed = core.ClosedJaxpr(jaxpr, ())
    to = [batching.zero_if_mapped] * len(jaxpr.outvars)
    return batching.batch_jaxpr_axes(closed, axis_data, dims, to)


def add_checkify_rule(primitive: core.Primitive, bind: Callable[..., Any]) -> None:
    """Makes `checkify` look into a primitive that runs the jaxpr in its parameter `jaxpr`.

    Args:
      bind: runs a jaxpr with more inputs, which come first: `bind(new_inputs, old_inputs, jaxpr,
        **params)`.
    """

    def rule(*args, jaxpr, **params):
        # JAX 0.12 passes a context first.
        count = next(i for i, arg in enumerate(args) if isinstance(arg, checkify.Error))
        context, (error, enabled, *values) = args[:count], args[count:]
        errors, tree = jax.tree.flatten(error)
        avals = map(jax.typeof, (*errors, *values))
        closed, tree, _ = checkify.jaxpr_to_checkify_jaxpr(
            *context, core.ClosedJaxpr(jaxpr, ()), enabled, tree, *avals
        )
        return jax.tree.unflatten(tree, bind(errors, values, closed, **params))

    checkify.error_checks[primitive] = rule


def saved_by_checkpoint(
    jaxpr: Any, is_tangent: list[bool], policy: Callable[..., Any]
) -> tuple[list[Any], list[bool]]:
    """Finds what `jax.checkpoint` saves for the backward of a differentiated function's jaxpr.

    `jax.checkpoint` finds the same in JAX's caches later.

    Args:
      is_tangent: which of the jaxpr's inputs are tangents.

    Returns:
      The types of the saved results, and which inputs the backward reads.
    """
    _, staged, is_unknown, is_staged, count = partial_eval.partial_eval_jaxpr_custom(
        jaxpr, is_tangent, [True] * len(is_tangent), False, False, policy
    )
    wanted = [unknown for unknown, one in zip(is_unknown, is_staged, strict=True) if one]
    _, is_read = partial_eval.dce_jaxpr(staged, wanted)
    saved = [var.aval for var, one in zip(staged.invars[:count], is_read, strict=False) if one]
    return saved, is_read[count:]


def run_backward(eqn: Any, *args: Any) -> list[Any]:
    """Runs the backward of a custom VJP and returns its nonzero gradients.

    Args:
      eqn: the equation `custom_lin`, which `jax.jvp` makes of a custom VJP.
      args: its residuals, and the cotangents of its results.
    """
    found = jax.tree.leaves(eqn.params["bwd"].call_wrapped(*args))
    if len(found) < eqn.params["in_zeros"].count(False):
        raise TypeError(f"custom_lin: got {len(found)} gradients: this version of JAX is unknown")
    return [x for x in found if isinstance(x, jax.Array)]  # the others are symbolic zeros


def has_effects(eqn: Any) -> bool:
    """Whether an equation has side effects, such as callbacks and references."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def current_trace() -> Any:
    """The trace of the code that runs."""
    return core_internals.trace_ctx.trace


def keeps_arrays(value: Any, trace: Any) -> bool:
    """Whether functions in the parameters of an equation reach arrays of a trace that has ended.

    A rule of a custom derivative may have them in its closure. Caches of JAX and of frameworks keep
    arrays of ended traces as well, but nothing reads those again.

    Args:
      value: a parameter of an equation.
      trace: the trace.
    """
    todo, seen = [value], dict[int, Any]()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | core.Jaxpr | core.ClosedJaxpr):
            continue
        seen[id(one)] = one
        if issubclass(type(one), core_internals.Tracer):
            if one._trace is trace:
                return True
        elif isinstance(one, FunctionType):  # without its globals
            todo += [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__, one.__dict__]
        elif one is not trace:
            todo += gc.get_referents(one)
    return False


def is_differentiated() -> bool:
    """Whether the code that is traced runs inside `jax.jvp`, `jax.vjp` or `jax.linearize`."""
    traces = core_internals.unsafe_get_trace_stack(current_trace())
    return any(isinstance(trace, ad.JVPTrace | ad.LinearizeTrace) for trace in traces)


def cache_miss(jitted: Any) -> CellType:
    """The cell of the function that a jitted function calls when its cache misses.

    To be called again next time, the function returns the results, None and False. Other code
    holds references to the jitted `jax.nn.silu`, so only here `lm.patch` sees every call.
    """
    return jitted._cache_miss.__closure__[0]


def without_compiler_options(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Splits a jitted function into the same function without `compiler_options`, and the options.

    JAX accepts them only in the outermost `jax.jit`. Other functions are returned unchanged.
    """
    info = getattr(fn, "_jit_info", None)
    if info is None or not info.compiler_options_kvs:
        return fn, {}
    plain = _cpp_pjit(fn.__wrapped__, info._replace(compiler_options_kvs=()))
    return plain, dict(info.compiler_options_kvs)


def lower_without_callbacks(traced: jax.stages.Traced) -> tuple[jax.stages.Lowered, list[str]]:
    """Lowers with zeros instead of the callbacks' results, and names the callbacks.

    Args:
      traced: the result of `jax.jit(fn).trace(...)`.

    Returns:
      The lowered program without callbacks, and the callbacks' names, such as "debug_print".
    """
    found: list[str] = []

    def zeros(ctx, *args, **params):
        found.append(ctx.primitive.name)

        def results(*args):
            # The barrier keeps the callback's operands alive until here.
            made = [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]
            return jax.lax.optimization_barrier((made, args))[0]

        return mlir.lower_fun(results, multiple_results=True)(ctx, *args)

    callbacks = (debug_callback_p, debug_print_p, io_callback_p, pure_callback_p)
    rules: Any = tuple((callback, zeros) for callback in callbacks)
    parameters = LoweringParameters(override_lowering_rules=rules)
    return traced.lower(_private_parameters=parameters), found
