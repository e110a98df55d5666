"""Cross-entropy of a linear layer's logits, tile by tile: no array of tokens x vocabulary exists.

With z = x K + b, the loss of a token with label y is logsumexp(z) - z_y. The gradient with respect
to z is g = softmax(z) - onehot(y); with respect to x and K it is g K^T and x^T g. A tile has the
whole rows of some tokens. If the loss is one number, the forward also computes the gradients, and
the backward multiplies them by the cotangent. This takes three products, as many as without tiles.
Sources: Liger-Kernel (arXiv:2410.10989), section 3.2; Cut Cross-Entropy (arXiv:2411.09009),
section 4.
"""

import math
from dataclasses import replace
from functools import partial
from string import ascii_lowercase
from typing import Any, Literal

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
from jaxtyping import Array, ArrayLike, Float, Int

from lowmembp_jax._arguments import as_array, call_custom_vjp, compute_dtype, undifferentiated
from lowmembp_jax._jax_internals import prim_requires_devices_during_lowering, varying
from lowmembp_jax._platform import is_for_tpu
from lowmembp_jax._tiling import array_mesh, resharded
from lowmembp_jax.kernels.partitioning import Partitioned
from lowmembp_jax.operators._logit_tiles import Spec, run_tiles

Reduction = Literal["mean", "sum", "none"]
_NAME, _MOST = "linear_cross_entropy", 2**31 - 1


@partial(jax.jit, static_argnums=0, inline=True)
def _run(spec: Spec, h, kernel, labels, c, d, bias) -> tuple[Any, ...]:
    """Calls `run_tiles` on arrays that may be sharded; unwanted gradients are None."""
    tokens = ascii_lowercase[: h.ndim - 1]
    named = [
        (h, tokens + "m"),
        (kernel, "vm" if spec.table else "mv"),
        *((x, tokens) for x in (labels, c, d)),
        (bias, "v"),
    ]
    arrays, axes = zip(*((x, axes) for x, axes in named if x is not None), strict=True)
    wanted = spec.wanted[:3]
    of = [axes for one, axes in zip(wanted, (axes[0], axes[1], "v"), strict=True) if one]
    run = Partitioned(
        partial(run_tiles, spec, tuple(x is not None for x, _ in named)),
        axes,
        ("", tokens, tokens, tokens, *of),
        whole="m",
        reduced="v",
        done=4,
        over=spec.over,
    )
    message = f"lm.{_NAME} has no second derivative; differentiate a loss of whole logits instead"
    results = undifferentiated(run, message)(*arrays)
    gradients = iter(results[4:])
    return *results[:4], [next(gradients) if one else None for one in wanted]


def _plain(spec: Spec, h, kernel, labels, c, bias) -> tuple[Array, Array, Array]:
    """Returns the value, the logsumexp and the right predictions, without gradients."""
    spec = replace(spec, wanted=(False,) * 4)
    total, losses, lse, right, _ = _run(spec, h, kernel, labels, c, None, bias)
    return (total if spec.summed else losses), lse, right


def _gradients(spec: Spec, h, kernel, labels, c, d, bias):
    """Calls `_run` with gradients; returns its results and the gradients' factor for float16."""
    if h.dtype != jnp.float16:
        return _run(spec, h, kernel, labels, c, d, bias), 1.0
    # Divided by their largest value, cotangents keep the slopes within the range of float16.
    size = jnp.maximum(*(0.0 if x is None else jnp.max(jnp.abs(x), initial=0) for x in (c, d)))
    size = jnp.where(size > 0, size, 1)
    c, d = (None if x is None else x / size for x in (c, d))
    total, *found = _run(spec, h, kernel, labels, c, d, bias)
    return (total * size, *found), size


_differentiated = jax.custom_vjp(_plain, nondiff_argnums=(0,))


def _forward(spec: Spec, *primals):
    inputs = tuple(None if p is None else p.value for p in primals)
    if not spec.summed:
        return _plain(spec, *inputs), (inputs, None)
    h, kernel, labels, c, bias = inputs
    (total, losses, lse, right, made), size = _gradients(spec, h, kernel, labels, c, None, bias)
    # The sums are wider than the gradients. These scalars carry the gradients' dtypes.
    like = [None if x is None else jnp.zeros((), x.dtype) for x in (h, kernel)]
    return (total, lse, right), (inputs if spec.returns_lse else None, (made, size, losses, like))


def _backward(spec: Spec, residuals, cotangents):
    inputs, kept = residuals
    given: list[Any] = [None if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
    g, g_lse, _ = given
    dh = dk = db = dc = None
    if kept is not None and g is not None:
        (dh, dk, db), size, losses, like = kept
        wide = losses.dtype
        dh, dk, db = (None if x is None else x.astype(wide) * (g * size) for x in (dh, dk, db))
        dc, g = losses * g if spec.wanted[3] else None, None
    if inputs is not None and (g is not None or g_lse is not None):
        h, kernel, labels, _, bias = inputs
        like, wide = (h, kernel), compute_dtype(h.dtype)
        g = jnp.zeros_like(g_lse) if g is None else g
        (*_, more), size = _gradients(spec, h, kernel, labels, g, g_lse, bias)
        more = (None if x is None else x.astype(wide) * size for x in more)
        dh, dk, db = (
            x if new is None else new if x is None else x + new
            for x, new in zip((dh, dk, db), more, strict=True)
        )
    dh, dk = (None if x is None else x.astype(like[i].dtype) for i, x in enumerate((dh, dk)))
    return dh, dk, None, dc, db


_differentiated.defvjp(_forward, _backward, symbolic_zeros=True)

# Like `jax.checkpoint`, the loss is a primitive, which JAX batches before it differentiates. So
# losses with one kernel become a loss of more tokens, with a single gradient of the kernel.
_loss_p = core.Primitive(_NAME)
_loss_p.multiple_results = True
prim_requires_devices_during_lowering.add(_loss_p)  # because of `Partitioned`


@_loss_p.def_impl
def _loss(h, kernel, labels, c, *bias, spec):
    return _plain(spec, h, kernel, labels, c, *(bias or [None]))


_loss_p.def_abstract_eval(
    lambda *avals, spec: jax.make_jaxpr(partial(_loss, spec=spec))(*avals).out_avals
)
mlir.register_lowering(_loss_p, mlir.lower_fun(_loss, multiple_results=True))


def _jvp(primals, tangents, *, spec):
    varied = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    spec = replace(spec, wanted=tuple(i in varied for i in (0, 1, 4, 3)))

    def of_varied(*given):
        args: dict[int, Any] = dict(enumerate(primals)) | dict(zip(varied, given, strict=True))
        return _differentiated(spec, *(args.get(i) for i in range(5)))

    y, dy = jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])
    return y, [
        ad.Zero(jax.typeof(a).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
        for a, t in zip(y, dy, strict=True)
    ]


ad.primitive_jvps[_loss_p] = _jvp


def _batch(args, dims, *, spec):
    [size] = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    shared = dims[1] is None and not any(d is not None for d in dims[4:])
    h, kernel, labels, c, *bias = (
        x if shared and i in (1, 4) else batching.bdim_at_front(x, d, size)
        for i, (x, d) in enumerate(zip(args, dims, strict=True))
    )
    if not shared:
        args = (h, kernel, labels, c, *bias)
        return lax.map(lambda args: _loss_p.bind(*args, spec=spec), args), [0] * 3
    each = replace(spec, summed=False)
    value, lse, right = _loss_p.bind(h, kernel, labels, c, *bias, spec=each)
    if spec.summed:
        value = jnp.sum(jnp.where(labels < 0, 0, value * c), tuple(range(1, value.ndim)))
    return [value, lse, right], [0] * 3


batching.primitive_batchers[_loss_p] = _batch


def _checked_labels(labels: Any, shape: tuple[int, ...], vocab: int, ignore: int | None) -> Array:
    labels = as_array(labels, f"{_NAME}: labels")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{_NAME}: labels: expected integers, got {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"{_NAME}: labels: expected the shape {shape} of hidden's tokens, got {labels.shape}"
        )
    info = jnp.iinfo(labels.dtype)  # a cast alone would make large labels negative
    labels = jnp.clip(labels, max(info.min, -1), min(info.max, _MOST)).astype(jnp.int32)
    if not isinstance(ignore, int | np.integer | None) or isinstance(ignore, bool):
        raise TypeError(f"{_NAME}: ignore_index: expected an integer or None, got {ignore!r}")
    if ignore is not None:
        labels = jnp.where(labels == min(max(ignore, -1), _MOST), -1, labels)
    is_known = not isinstance(labels, Tracer) and labels.is_fully_addressable
    if is_known and (largest := int(np.max(labels, initial=-1))) >= vocab:
        raise ValueError(
            f"{_NAME}: labels: expected numbers below the vocabulary's size {vocab}, got {largest}"
        )
    return labels


def _number(name: str, x: Any, most: float, *, is_positive: bool = False) -> float:
    is_number = isinstance(x, int | float | np.number) and not isinstance(x, bool)
    if not is_number or not 0 <= x < most or (is_positive and not x):
        interval = f"{'(' if is_positive else '['}0, {most})"
        raise (ValueError if is_number else TypeError)(
            f"{_NAME}: {name}: expected a number in {interval}, got {x!r}"
        )
    return float(x)


def _floating(name: str, x: Any) -> Array:
    x = as_array(x, f"{_NAME}: {name}")
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(f"{_NAME}: {name}: expected floats of 16 bits or more, got {x.dtype}")
    return x


def _placed(is_table: bool, arrays: list[Any]) -> list[Any]:
    """Reshards the arrays under an explicit mesh, so that all agree and features are whole.

    The tokens of all arrays are sharded as in hidden. Their words are sharded as in the kernel,
    unless the tokens use the same axes of the mesh.
    """
    h, kernel, *_ = arrays
    if AxisType.Explicit not in array_mesh(h, kernel).axis_types:
        return arrays
    flat = lambda entry: set(jax.tree.leaves(entry))  # noqa: E731
    tokens = jax.typeof(h).sharding.spec[:-1]
    words = jax.typeof(kernel).sharding.spec[0 if is_table else 1]
    words = None if flat(words) & flat(list(tokens)) else words
    rows = P(words, None) if is_table else P(None, words)
    specs = (P(*tokens, None), rows, P(*tokens), P(*tokens), P(words))
    return [
        None if x is None else resharded(x, spec) for x, spec in zip(arrays, specs, strict=True)
    ]


def _along(arrays: list[Any], over: tuple[str, ...]) -> list[Any]:
    """Casts arrays inside `shard_map` to vary along every axis that one of them varies along.

    Labels and weights do not vary along the axes `over`, which split the words.
    """
    h, kernel, labels, c, bias = arrays
    axes = varying(*(x for x in arrays if x is not None)) - set(over)
    if over and not set(over) <= varying(kernel):
        raise ValueError(
            f"{_NAME}: axis_name: expected axes that the kernel varies along, in a shard_map with "
            f"check_vma=True, got {over}"
        )

    def cast(x: Array | None, axes: frozenset[str]) -> Array | None:
        missing = () if x is None else tuple(axes - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x, axes | set(over)) for x in (h, kernel)] + [
        *(cast(x, axes) for x in (labels, c)),
        cast(bias, axes | set(over)),
    ]


def linear_cross_entropy(
    hidden: Float[Array, "*tokens features"],
    kernel: Float[Array, "features vocab"] | Float[Array, "vocab features"] | None,
    labels: Int[Array, "*tokens"],
    *,
    embedding: Float[Array, "vocab features"] | None = None,
    bias: Float[Array, "vocab"] | None = None,
    reduction: Reduction = "mean",
    logit_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    weights: Float[ArrayLike, "*tokens"] | None = None,
    ignore_index: int | None = None,
    return_logsumexp: bool = False,
    return_correct: bool = False,
    tile_bytes: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Any:
    """Computes the cross-entropy of `hidden @ kernel` without an array of tokens x vocabulary.

    Forward and backward have the logits of some tokens at a time in memory, in float32 (float64
    for float64). Loss and gradients are exact: up to rounding, they equal
    `optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, labels)`.

    With reduction "mean" or "sum" the forward also computes the gradients, and the backward
    multiplies them by the cotangent. This takes three products, as many as plain JAX. The
    residuals are the gradients of hidden, in its dtype, and of kernel, in float32. Unneeded
    gradients, such as the gradient of a frozen kernel, are not computed. With reduction "none" the
    backward recomputes each tile's logits, which is a fourth product.

    Sharded tokens and a sharded vocabulary stay sharded, under meshes with automatic or explicit
    axes and inside `jax.shard_map`. Devices that share the vocabulary exchange numbers per token
    and the gradient of hidden. A kernel that is sharded over its features is gathered.

    Under `jax.vmap`, tokens that share a kernel are computed as one larger batch.

    Args:
      hidden: `[*tokens, features]`, floating. The products run in the promoted dtype of hidden and
        kernel, and accumulate in float32.
      kernel: `[features, vocab]` as in `nn.Dense`, or `[vocab, features]` as in `nn.Embed`. A
        square kernel is read as `[features, vocab]`. None if `embedding` is given.
      labels: `[*tokens]`, integers. A token with a negative label is ignored: the mean leaves it
        out, its loss is 0, and its values affect no result and no gradient.
      embedding: `[vocab, features]`, instead of `kernel`; it is not copied or transposed.
      bias: `[vocab]`, added to the logits.
      reduction: "mean", "sum", or "none" for a loss per token.
      logit_soft_cap: c in c tanh(logits / c), as in Gemma 2 (arXiv:2408.00118). Above 0.
      z_loss: adds z_loss logsumexp^2 to a token's loss, as in PaLM (arXiv:2204.02311), section 5.
      label_smoothing: e of the targets (1 - e) onehot + e / vocab, as `optax.smooth_labels`. In
        [0, 1).
      weights: `[*tokens]`, multiplies each token's loss. The mean is the weighted sum divided by
        the sum of the weights.
      ignore_index: tokens with this label are ignored, too.
      return_logsumexp: also returns the logsumexp of the (capped) logits.
      return_correct: also returns how many predictions are right. The prediction is the likeliest
        word, or the first of several.
      tile_bytes: the most bytes of logits in memory on each device, but at least one token's; by
        default 2^29, and 2^27 on TPUs. The gradient of the logits takes as much again if the kernel
        is trained. A symbolic number of tokens (`jax.export`) is padded to whole tiles.
      axis_name: inside `jax.shard_map`, the axis of the mesh that splits the vocabulary of the
        kernel and the bias. Labels number the words of all devices.

    Returns:
      The loss, float32 (float64 for float64): a scalar, or `[*tokens]` with reduction "none".
      With `return_logsumexp` or `return_correct`, a tuple of the loss; the logsumexp, `[*tokens]`,
      0 for ignored tokens; the count, int32, or booleans `[*tokens]` with reduction "none".

      NaN and infinity reach the loss and the gradients as in plain JAX. The mean of no tokens is
      NaN. Under `jax.jit`, a label beyond the vocabulary makes loss and gradients NaN.

    Raises:
      TypeError: hidden, kernel or bias is not floating; labels are not integers; a number has
        another type; `jax.jvp` is used, because the loss has only a reverse-mode derivative.
      ValueError: shapes do not match; a number is out of range; the reduction is unknown; a label
        is beyond the vocabulary (outside `jax.jit`).
      NotImplementedError: a second derivative is used.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{_NAME}: reduction: expected mean, sum or none, got {reduction!r}")
    if (kernel is None) == (embedding is None):
        raise ValueError(f"{_NAME}: kernel: expected either kernel or embedding, got both or none")
    name, table = ("kernel", kernel) if embedding is None else ("embedding", embedding)
    h, table = _floating("hidden", hidden), _floating(name, table)
    features = h.shape[-1] if h.ndim else None
    if table.ndim != 2 or features not in (table.shape if embedding is None else table.shape[1:]):
        shapes = "[features, vocab] or " * (embedding is None) + "[vocab, features]"
        raise ValueError(
            f"{_NAME}: {name}: expected {shapes} for hidden {h.shape}, got {table.shape}"
        )
    is_table = embedding is not None or table.shape[0] != features
    over = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    vocab = table.shape[0 if is_table else 1] * math.prod(lax.axis_size(axis) for axis in over)
    if not vocab:
        raise ValueError(f"{_NAME}: {name}: expected at least one word, got {table.shape}")
    tile_bytes = (2**27 if is_for_tpu() else 2**29) if tile_bytes is None else tile_bytes
    if not isinstance(tile_bytes, int) or tile_bytes < 1:
        raise ValueError(f"{_NAME}: tile_bytes: expected an integer from 1 on, got {tile_bytes!r}")
    labels = _checked_labels(labels, h.shape[:-1], vocab, ignore_index)
    dtype = jnp.promote_types(h.dtype, table.dtype)
    wide = compute_dtype(dtype)
    h, table = (x.astype(dtype) for x in (h, table))
    if bias is not None:
        bias = _floating("bias", bias).astype(wide)
        if bias.shape != (table.shape[0 if is_table else 1],):
            raise ValueError(f"{_NAME}: bias: expected shape [vocab], ({vocab},), got {bias.shape}")
    c = (labels >= 0).astype(wide)
    if weights is not None:
        weights = as_array(weights, f"{_NAME}: weights")
        if weights.shape != labels.shape:
            raise ValueError(
                f"{_NAME}: weights: expected labels' shape {labels.shape}, got {weights.shape}"
            )
        c = jnp.where(labels < 0, 0, weights.astype(wide))
    summed, cap = reduction != "none", logit_soft_cap
    cap = cap if cap is None else _number("logit_soft_cap", cap, math.inf, is_positive=True)
    spec = Spec(
        is_table,
        summed,
        return_logsumexp,
        cap,
        _number("z_loss", z_loss, math.inf),
        _number("label_smoothing", label_smoothing, 1),
        tile_bytes,
        over,
    )
    given = _along(_placed(is_table, [h, table, labels, c, bias]), over)
    args = (x for x in given if x is not None)
    value, lse, right = call_custom_vjp(f"lm.{_NAME}", partial(_loss_p.bind, spec=spec), *args)
    if reduction == "mean":
        value = value / jnp.sum(c)
    elif not summed and weights is not None:
        value = value * c
    correct = jnp.sum(right) if summed else right
    found = (value, *[lse] * return_logsumexp, *[correct] * return_correct)
    return found if len(found) > 1 else value
