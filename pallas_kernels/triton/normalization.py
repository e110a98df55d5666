"""LayerNorm and RMSNorm over rows: one pass forward, one pass backward from (y, rstd).

Each program writes one row of partial sums of the parameter gradients, which are summed here. There
are no atomics, so results are the same in every run. Source: LowMemoryBP (arXiv:2406.16282),
section 5.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.interface import NormForward, check_float, check_rows
from pallas_kernels.triton import wide_rows
from pallas_kernels.triton.launch import batchable, call
from pallas_kernels.triton.row_launches import backward_launch, forward_launch, sums_launch


def norm_forward(
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"] | None,
    bias: Float[Array, " width"] | None,
    *,
    center: bool,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    keep_normalized: bool,
    cores: int | None = None,
) -> NormForward:
    """Normalizes every row of x in one pass.

    Arguments, results and other errors are as for `pallas_kernels.normalization.norm_forward`.

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    del cores  # a program for every row on any device
    dtype = check_float("dtype", dtype)
    check_rows(x.shape, x=x, scale=scale, bias=bias)
    keep_normalized = keep_normalized and not (scale is None and bias is None)
    rows, width = x.shape
    if x.size == 0:
        empty, rstd = jnp.zeros(x.shape, dtype), jnp.full((rows,), jnp.nan, jnp.float32)
        return NormForward(empty, rstd, empty if keep_normalized else None)
    static = dict(center=center, epsilon=epsilon, keep_normalized=keep_normalized)

    def run(x, scale, bias):
        launch = forward_launch(
            rows, width, dtype, scale=scale is not None, bias=bias is not None, **static
        )
        inputs = (x if array is None else array for array in (x, scale, bias))
        out, normalized, rstd = call(launch, *inputs)
        return NormForward(out, rstd, normalized if keep_normalized else None)

    def fold(count, batched, x, scale, bias):
        if batched != [True, False, False]:
            return None
        results = norm_forward(x.reshape(count * rows, width), scale, bias, dtype=dtype, **static)
        return jax.tree.map(lambda a: a.reshape(count, rows, *a.shape[1:]), results)

    return batchable(run, fold)(x, scale, bias)


def norm_backward(
    kept: Float[Array, "rows width"],
    rstd: Float32[Array, " rows"],
    g: Float[Array, "rows width"],
    scale: Float[Array, " width"] | None,
    bias: Float[Array, " width"] | None,
    *,
    center: bool,
    x_dtype: jax.typing.DTypeLike,
    recover: bool,
    cores: int | None = None,
) -> tuple[
    Float[Array, "rows width"], Float[Array, " width"] | None, Float[Array, " width"] | None
]:
    """Computes the gradients of `norm_forward` from its saved results in one pass.

    Arguments, results and other errors are as for `pallas_kernels.normalization.norm_backward`.

    Raises:
      RuntimeError: Triton or jax-triton is missing.
    """
    x_dtype = check_float("x_dtype", x_dtype)
    check_rows(kept.shape, kept=kept, rstd=rstd, g=g, scale=scale, bias=bias)
    width = kept.shape[1]
    if kept.size == 0:
        zeros = (None if p is None else jnp.zeros_like(p) for p in (scale, bias))
        return jnp.zeros(kept.shape, x_dtype), *zeros
    static = dict(center=center, x_dtype=x_dtype, recover=recover, cores=cores)
    dx, *sums = _backward(1, kept, rstd, g, scale, bias, **static)
    return dx, *(None if a is None else a.reshape(width) for a in sums)


def _backward(segments, *arrays, center, x_dtype, recover, cores):
    """`norm_backward` for segments of equal numbers of rows.

    Parameter gradients are `[segments, width]`. Under `jax.vmap`, each element of the batch becomes
    a segment.
    """
    height, width = arrays[0].shape

    def run(kept, rstd, g, scale, bias):
        rows = height // segments
        affine = dict(scale=scale is not None, bias=bias is not None, recover=recover)
        launch = backward_launch(
            segments, rows, width, x_dtype, center=center, cores=cores, **affine
        )
        inputs = [rstd if a is None else a for a in (kept, rstd, g, scale, bias)]
        dx, *partials = call(launch, *inputs)
        if launch.kernel is wide_rows.backward_kernel and (affine["scale"] or affine["bias"]):
            launch = sums_launch(segments, rows, width, cores=cores, **affine)
            partials = call(launch, inputs[0], *inputs[2:])
        return dx, *(
            None if p is None else jnp.sum(partial, axis=1).astype(p.dtype)
            for partial, p in zip(partials, (scale, bias), strict=True)
        )

    def fold(count, batched, *arrays):
        if batched != [True, True, True, False, False]:
            return None
        arrays = [
            a.reshape(count * height, *a.shape[2:]) if each else a
            for a, each in zip(arrays, batched, strict=True)
        ]
        results = _backward(
            count * segments, *arrays, center=center, x_dtype=x_dtype, recover=recover, cores=cores
        )
        return jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, width), results)

    return batchable(run, fold)(*arrays)
