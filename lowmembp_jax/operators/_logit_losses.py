"""The losses of `_logit_tiles` as one primitive: derivatives, batches, meshes, and checks.

If the loss is one number, the forward also computes the gradients, and the backward multiplies them
by the cotangent. Otherwise, and for few tokens, the backward computes the logits again.
"""

import math
from dataclasses import replace
from functools import partial, reduce
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from lowmembp_jax._arguments import as_array, call_custom_vjp, compute_dtype, undifferentiated
from lowmembp_jax._contexts import is_for_tpu
from lowmembp_jax._jax_internals import prim_requires_devices_during_lowering, varying
from lowmembp_jax._tiling import array_mesh, resharded
from lowmembp_jax.kernels.partitioning import Partitioned
from lowmembp_jax.operators._logit_tiles import run_tiles
from lowmembp_jax.operators._logit_words import Arrays, Spec

_MOST = 2**31 - 1


@partial(jax.jit, static_argnums=0, inline=True)
def _run(spec: Spec, arrays: Arrays, ct: dict[str, Array], known: dict[str, Array]) -> Any:
    """Calls `run_tiles` on arrays that may be sharded.

    Returns:
      The sum and a dict of the numbers per token, for a forward; else None and {}. Then the
      gradients of hidden, kernel and bias; unwanted ones are None.
    """
    tokens = ascii_lowercase[: arrays.hidden.ndim - 1]
    matrices = ["vm" if table else "mv" for table in spec.tables]
    axes = Arrays(tokens + "m", matrices[0], tokens, tokens, "v", tokens + "n")
    axes = axes._replace(reference_kernel=matrices[1].replace("m", "n"), reference_bias="v")
    # A negative label makes `run_tiles` ignore all other numbers of a token.
    neutral = Arrays(None, 0, -1, None, 0, None, 0, 0)
    fields = {name: x for name, x in arrays._asdict().items() if x is not None}
    given = tuple(map(tuple, (fields, ct, known)))
    wanted = spec.wanted[:3]
    of = [one for one, is_wanted in zip((axes[0], axes[1], "v"), wanted, strict=True) if is_wanted]
    found = () if known else ("", *[tokens] * len(spec.found))
    run = Partitioned(
        jax.named_scope(spec.name)(partial(run_tiles, spec, given)),  # for the planner's rows
        (*(getattr(axes, name) for name in fields), *[tokens] * (len(ct) + len(known))),
        (*found, *of),
        (*(getattr(neutral, name) for name in fields), *[None] * (len(ct) + len(known))),
        whole="m" if arrays.reference_hidden is None else "mn",
        reduced="v",
        done=len(found),
        over=spec.over,
    )
    message = f"lm.{spec.name} has no second derivative; differentiate a loss of whole logits"
    results = undifferentiated(run, message)(*fields.values(), *ct.values(), *known.values())
    numbers, made = results[: len(found)], iter(results[len(found) :])
    total, *numbers = numbers or (None,)
    gradients = [next(made) if one else None for one in wanted]
    return total, dict(zip(spec.found, numbers, strict=False)), gradients


def _values(spec: Spec, total: Array, numbers: dict[str, Array]) -> tuple[Array, ...]:
    """The value, and the results that the caller gets beside it."""
    return (total if spec.summed else numbers["loss"], *(numbers[name] for name in spec.results))


def _cut(spec: Spec, arrays: Arrays) -> tuple[Spec, bool]:
    """Whether the forward computes the gradients, and the spec with tiles for that.

    There the gradient of the kernel is a sum in float32. For few tokens, this sum and a tile take
    more than whole logits would, so the backward, which cuts the words as well, computes it.
    """
    h, tokens = arrays.hidden, math.prod(arrays.hidden.shape[:-1])
    if not isinstance(tokens, int):
        return spec, spec.summed
    kernel, wide, narrow = arrays.kernel.size, compute_dtype(h.dtype).itemsize, h.dtype.itemsize
    logits, least = tokens * (kernel // max(1, h.shape[-1])) * narrow, min(spec.tile_bytes, 2**26)
    sums = kernel * (wide if narrow == wide else wide + narrow)
    sums = sums if spec.summed and spec.wanted[1] else 0
    is_now = spec.summed and logits - sums >= least
    most = max(least, (logits - sums) // 2 if is_now and sums else logits // 4)
    return replace(spec, tile_bytes=min(spec.tile_bytes, most)), is_now


def _plain(spec: Spec, arrays: Arrays) -> tuple[Array, ...]:
    spec, _ = _cut(replace(spec, wanted=(False,) * 4), arrays)
    total, numbers, _ = _run(spec, arrays, {}, {})
    return _values(spec, total, numbers)


def _normalized(dtype: Any, ct: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Divides cotangents by their largest value; keeps slopes within the range of float16."""
    if dtype != jnp.float16:
        return 1.0, ct
    size = reduce(jnp.maximum, (jnp.max(jnp.abs(x), initial=0) for x in ct.values()))
    size = jnp.where(size > 0, size, 1)
    return size, {name: x / size for name, x in ct.items()}


_differentiated = jax.custom_vjp(_plain, nondiff_argnums=(0,))


def _forward(spec: Spec, arrays: Arrays):
    arrays = jax.tree.map(lambda p: p.value, arrays, is_leaf=lambda p: hasattr(p, "perturbed"))
    kept, (spec, is_now) = None, _cut(spec, arrays)
    if is_now:
        size, weights = _normalized(arrays.hidden.dtype, {"loss": arrays.weights})
        total, numbers, gradients = _run(spec, arrays._replace(weights=weights["loss"]), {}, {})
        total, kept = total * size, (gradients, size)
    else:
        total, numbers, _ = _run(replace(spec, wanted=(False,) * 4), arrays, {}, {})
    # The sums are wider than the gradients. These scalars carry the gradients' dtypes.
    like = [jnp.zeros((), x.dtype) for x in arrays[:2]]
    statistics = {name: numbers[name] for name in spec.statistics}
    again = (arrays, statistics) if not is_now or "logsumexp" in spec.results else None
    losses = numbers["loss"] if spec.summed else None
    return _values(spec, total, numbers), (again, kept, losses, like)


def _backward(spec: Spec, residuals, cotangents):
    again, kept, losses, like = residuals
    names = ("loss", *spec.results)
    ct = {
        name: x
        for name, x in zip(names, cotangents, strict=True)
        if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0
    }
    gradients: list[Any] = [None] * 3
    weights = None
    if spec.summed and "loss" in ct:
        g = ct.pop("loss")
        weights = losses * g if spec.wanted[3] else None
        if kept is None:
            ct["loss"] = again[0].weights * g
        else:
            gradients, size = kept
            gradients = [None if x is None else x.astype(g.dtype) * (g * size) for x in gradients]
    if again is not None and ct:
        arrays, statistics = again
        spec, _ = _cut(spec, arrays)
        if "loss" not in ct:
            ct["loss"] = jnp.zeros(arrays.labels.shape, compute_dtype(arrays.hidden.dtype))
        size, ct = _normalized(arrays.hidden.dtype, ct)
        *_, more = _run(spec, arrays._replace(weights=None), ct, statistics)
        if arrays.hidden.dtype == jnp.float16:
            more = [None if x is None else x.astype(jnp.float32) * size for x in more]
        gradients = [
            x if new is None else new if x is None else x + new
            for x, new in zip(gradients, more, strict=True)
        ]
    *both, db = gradients
    pairs = zip(both, like, strict=True)
    dh, dk = (None if x is None else x.astype(one.dtype) for x, one in pairs)
    return (Arrays(dh, dk, None, weights, db),)


_differentiated.defvjp(_forward, _backward, symbolic_zeros=True)

# Like `jax.checkpoint`, the loss is a primitive, which JAX batches before it differentiates. So
# losses with one kernel become a loss of more tokens, with a single gradient of the kernel.
_loss_p = core.Primitive("linear_cross_entropy")
_loss_p.multiple_results = True
prim_requires_devices_during_lowering.add(_loss_p)  # because of `Partitioned`


@_loss_p.def_impl
def _loss(*args, spec, names):
    return _plain(spec, _arrays(names, args))


def _arrays(names: tuple[str, ...], args: Any) -> Arrays:
    """The arguments by name; the others are None."""
    return Arrays(**(dict.fromkeys(Arrays._fields[:3]) | dict(zip(names, args, strict=True))))


_loss_p.def_abstract_eval(
    lambda *avals, **static: jax.make_jaxpr(partial(_loss, **static))(*avals).out_avals
)
mlir.register_lowering(_loss_p, mlir.lower_fun(_loss, multiple_results=True))


def _jvp(primals, tangents, *, spec, names):
    moves = {
        name: (x, t)
        for name, x, t in zip(names, primals, tangents, strict=True)
        if not isinstance(t, ad.Zero)
    }
    of = ("hidden", "kernel", "bias", "weights")
    spec = replace(spec, wanted=tuple(name in moves for name in of))
    arrays = _arrays(names, primals)
    varied = [name for name in moves if name in of]

    def of_varied(*given):
        return _differentiated(spec, arrays._replace(**dict(zip(varied, given, strict=True))))

    given, moved = ([moves[name][i] for name in varied] for i in (0, 1))
    y, dy = jax.jvp(of_varied, given, moved)
    return y, [
        ad.Zero(jax.typeof(a).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
        for a, t in zip(y, dy, strict=True)
    ]


ad.primitive_jvps[_loss_p] = _jvp
_SHARED = ("kernel", "bias", "reference_kernel", "reference_bias")


def _batch(args, dims, *, spec, names):
    [size] = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    shared = not any(d is not None and name in _SHARED for name, d in zip(names, dims, strict=True))
    moved = [
        x if shared and name in _SHARED else batching.bdim_at_front(x, d, size)
        for name, x, d in zip(names, args, dims, strict=True)
    ]
    if not shared:
        found = lax.map(lambda args: _loss_p.bind(*args, spec=spec, names=names), moved)
        return found, [0] * len(found)
    value, *rest = _loss_p.bind(*moved, spec=replace(spec, summed=False), names=names)
    if spec.summed:
        arrays = _arrays(names, moved)
        value = jnp.where(arrays.labels < 0, 0, value * arrays.weights)
        value = jnp.sum(value, tuple(range(1, value.ndim)))
    return [value, *rest], [0] * (1 + len(rest))


batching.primitive_batchers[_loss_p] = _batch


def evaluate(spec: Spec, arrays: Arrays) -> tuple[Array, ...]:
    """Returns the value and `spec.results`. Arrays have the dtypes in which they compute."""
    arrays = _along(_placed(spec, arrays), spec)
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    call = partial(_loss_p.bind, spec=spec, names=tuple(given))
    return call_custom_vjp(f"lm.{spec.name}", call, *given.values())


def _placed(spec: Spec, arrays: Arrays) -> Arrays:
    """Reshards the arrays under an explicit mesh, so that all agree and features are whole.

    The tokens of all arrays are sharded as in hidden. Their words are sharded as in the kernel,
    unless the tokens use the same axes of the mesh.
    """
    h, kernel = arrays[:2]
    if AxisType.Explicit not in array_mesh(h, kernel).axis_types:
        return arrays
    flat = lambda entry: set(jax.tree.leaves(entry))  # noqa: E731
    tokens = jax.typeof(h).sharding.spec[:-1]
    words = jax.typeof(kernel).sharding.spec[0 if spec.tables[0] else 1]
    words = None if flat(words) & flat(list(tokens)) else words
    rows = [P(words, None) if table else P(None, words) for table in spec.tables]
    hidden, each = P(*tokens, None), P(*tokens)
    specs = Arrays(hidden, rows[0], each, each, P(words), hidden, rows[1], P(words))
    pairs = zip(arrays, specs, strict=True)
    return Arrays(*(None if x is None else resharded(x, one) for x, one in pairs))


def _along(arrays: Arrays, spec: Spec) -> Arrays:
    """Casts arrays inside `shard_map` to vary along every axis that one of them varies along.

    Numbers per token do not vary along the axes `spec.over`, which split the words.
    """
    over = set(spec.over)
    axes = varying(*(x for x in arrays if x is not None)) - over
    if not over <= varying(arrays.kernel):
        raise ValueError(
            f"{spec.name}: axis_name: expected axes that the kernel varies along, in a shard_map "
            f"with check_vma=True, got {spec.over}"
        )

    def cast(name: str, x: Array | None) -> Array | None:
        whole = axes if name in ("labels", "weights") else axes | over
        missing = () if x is None else tuple(whole - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return Arrays(*map(cast, Arrays._fields, arrays))


def floating(x: Any, name: str) -> Array:
    """Converts an argument to floats of 16 bits or more; raises TypeError."""
    x = as_array(x, name)
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(f"{name}: expected floats of 16 bits or more, got {x.dtype}")
    return x


def checked_number(x: Any, name: str, most: float, *, is_positive: bool = False) -> float:
    is_number = isinstance(x, int | float | np.number) and not isinstance(x, bool)
    if not is_number or not 0 <= x < most or (is_positive and not x):
        interval = f"{'(' if is_positive else '['}0, {most})"
        kind = ValueError if is_number else TypeError
        raise kind(f"{name}: expected a number in {interval}, got {x!r}")
    return float(x)


def checked_cap(x: Any, function: str) -> float | None:
    name = f"{function}: logit_soft_cap"
    return None if x is None else checked_number(x, name, math.inf, is_positive=True)


def checked_tile_bytes(x: Any, function: str) -> int:
    x = (2**27 if is_for_tpu() else 2**29) if x is None else x
    if not isinstance(x, int) or isinstance(x, bool) or x < 1:
        raise ValueError(f"{function}: tile_bytes: expected an integer from 1 on, got {x!r}")
    return x


def checked_axes(x: Any) -> tuple[str, ...]:
    return (x,) if isinstance(x, str) else tuple(x or ())


def checked_model(
    hidden: Any, kernel: Any, embedding: Any, bias: Any, function: str, prefix: str = ""
) -> tuple[Array, Array, Array | None, bool]:
    """Checks the arrays of one model, whose arguments' names begin with `prefix`.

    Returns:
      hidden and kernel in the dtype of their product, bias in float32 or float64, and whether the
      kernel is [vocab, features].
    """
    if (kernel is None) == (embedding is None):
        raise ValueError(
            f"{function}: {prefix}kernel: expected either {prefix}kernel or {prefix}embedding, got "
            f"both or none"
        )
    name, table = ("kernel", kernel) if embedding is None else ("embedding", embedding)
    name = f"{function}: {prefix}{name}"
    h, table = floating(hidden, f"{function}: {prefix}hidden"), floating(table, name)
    features = h.shape[-1] if h.ndim else None
    if table.ndim != 2 or features not in (table.shape if embedding is None else table.shape[1:]):
        shapes = "[features, vocab] or " * (embedding is None) + "[vocab, features]"
        raise ValueError(f"{name}: expected {shapes} for hidden {h.shape}, got {table.shape}")
    is_table = embedding is not None or table.shape[0] != features
    vocab = table.shape[0 if is_table else 1]
    if not vocab:
        raise ValueError(f"{name}: expected at least one word, got {table.shape}")
    dtype = jnp.promote_types(h.dtype, table.dtype)
    if bias is not None:
        bias = floating(bias, f"{function}: {prefix}bias").astype(compute_dtype(dtype))
        if bias.shape != (vocab,):
            raise ValueError(
                f"{function}: {prefix}bias: expected shape [vocab], ({vocab},), got {bias.shape}"
            )
    return h.astype(dtype), table.astype(dtype), bias, is_table


def checked_labels(
    labels: Any, shape: tuple[int, ...], vocab: int, ignore: int | None, function: str
) -> Array:
    """Returns int32 labels, -1 for ignored tokens."""
    labels = as_array(labels, f"{function}: labels")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{function}: labels: expected integers, got {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"{function}: labels: expected the shape {shape} of hidden's tokens, got {labels.shape}"
        )
    info = jnp.iinfo(labels.dtype)  # a cast alone would make large labels negative
    labels = jnp.clip(labels, max(info.min, -1), min(info.max, _MOST)).astype(jnp.int32)
    if not isinstance(ignore, int | np.integer | None) or isinstance(ignore, bool):
        raise TypeError(f"{function}: ignore_index: expected an integer or None, got {ignore!r}")
    if ignore is not None:
        labels = jnp.where(labels == min(max(ignore, -1), _MOST), -1, labels)
    is_known = not isinstance(labels, Tracer) and labels.is_fully_addressable
    if is_known and (largest := int(np.max(labels, initial=-1))) >= vocab:
        raise ValueError(
            f"{function}: labels: expected numbers below the vocabulary's size {vocab}, got "
            f"{largest}"
        )
    return labels
