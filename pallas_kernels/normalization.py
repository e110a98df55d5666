"""LayerNorm and RMSNorm over rows: one pass forward, one pass backward from (y, rstd).

A program holds whole rows in registers. Without parameter gradients, each program has a few rows.
With them, each multiprocessor has a few programs. Each program sums the gradients of its rows in
registers and writes one row of partial sums. There are no atomics, so results are the same in every
run. Source: LowMemoryBP (arXiv:2406.16282), section 5.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels import row_norm
from pallas_kernels.interface import NormForward, check_float, check_rows
from pallas_kernels.launch import launch
from pallas_kernels.row_tiling import both, row_tiling

FORWARD_NAME = "lowmembp_norm_forward"
BACKWARD_NAME = "lowmembp_norm_backward"


def _load(ref, mask, other: float = 0.0, policy: str | None = None) -> Array:
    other = None if mask is None else other
    values = plgpu.load(ref, mask=mask, other=other, eviction_policy=policy)
    return values.astype(jnp.float32)


def _store(ref, values: Array, mask) -> None:
    plgpu.store(ref, values.astype(ref.dtype), mask=mask)


def _parameters(scale_ref, bias_ref, mask, policy=None) -> tuple[Array | None, Array | None]:
    """Loads scale and bias, `[1, columns]`, padded with 1 and 0."""
    scale = None if scale_ref is None else _load(scale_ref, mask, 1.0, policy)
    return scale, None if bias_ref is None else _load(bias_ref, mask, policy=policy)


def _forward_kernel(x_ref, *refs, tiling, scale, bias, center, epsilon, keep_normalized):
    refs = list(refs)
    columns, rows = tiling.column_mask(), tiling.row_mask(pl.program_id(0), 0)
    mask = both(rows, columns, (tiling.tile_rows, tiling.columns))
    x = _load(x_ref, mask)
    scale_ref, bias_ref = (refs.pop(0) if given else None for given in (scale, bias))
    scale, bias = _parameters(scale_ref, bias_ref, columns)
    out_ref, rstd_ref, *refs = refs
    x, rstd = row_norm.standardize(x, columns, tiling.width, center=center, epsilon=epsilon)
    _store(out_ref, row_norm.affine(x, rstd, scale, bias), mask)
    if keep_normalized:
        _store(refs.pop(), x * rstd, mask)
    rows = None if rows is None else rows.reshape(tiling.tile_rows)
    _store(rstd_ref, rstd.reshape(tiling.tile_rows), rows)


def _backward_kernel(kept_ref, rstd_ref, g_ref, *refs, tiling, scale, bias, center, recover):
    refs = list(refs)
    columns = tiling.column_mask()
    shape = (tiling.tile_rows, tiling.columns)
    scale_ref, bias_ref = (refs.pop(0) if given else None for given in (scale, bias))
    dx_ref, *sum_refs = refs
    program = pl.program_id(0)  # read here, because an interpreted loop has no program id
    if not tiling.read_twice:
        parameters = _parameters(scale_ref, bias_ref, columns)

    def step(index, sums):
        rows = tiling.row_mask(program, index)
        mask = both(rows, columns, shape)
        tile = pl.ds(index * tiling.tile_rows, tiling.tile_rows)

        def inputs(policy=None):
            scale, bias = (
                _parameters(scale_ref, bias_ref, columns, policy)
                if tiling.read_twice
                else parameters
            )
            y = _load(kept_ref.at[tile, :], mask, policy=policy)
            if recover:
                inverse = row_norm.recovery(scale, bias, kept_ref.dtype)
                y = y if bias is None else y - bias
                y = y if inverse is None else y * inverse
                y = y if mask is None else jnp.where(mask, y, 0.0)
            g = _load(g_ref.at[tile, :], mask, policy=policy)
            return y, g, g if scale is None else g * scale

        y, g, inner = inputs("evict_last" if tiling.read_twice else None)
        means = row_norm.gradient_means(y, inner, tiling.width, center=center)
        if tiling.read_twice:
            y, g, inner = inputs("evict_first")
        rstd = _load(rstd_ref.at[tile], None if rows is None else rows.reshape(tiling.tile_rows))
        gradients = ([g * y] if scale else []) + ([g] if bias else [])
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        _store(dx_ref.at[tile, :], row_norm.input_gradient(y, rstd[:, None], inner, means), mask)
        return sums

    sums = [jnp.zeros(shape, jnp.float32) for _ in sum_refs]
    sums = step(0, sums) if tiling.steps == 1 else lax.fori_loop(0, tiling.steps, step, sums)
    for ref, total in zip(sum_refs, sums, strict=True):
        _store(ref, jnp.sum(total, axis=0, keepdims=True), columns)


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
    interpret: bool = False,
) -> NormForward:
    """Normalizes every row of x in one pass.

    Args:
      x: `[rows, width]`. All arrays are float32, bfloat16 or float16.
      scale, bias: `[width]` or None.
      center: True for LayerNorm, False for RMSNorm.
      epsilon: added to the variance.
      dtype: the dtype of the output.
      keep_normalized: also return the normalized x if there is a scale or bias.
      cores: multiprocessors of the target device; None for 132.
      interpret: run on the CPU, without Triton.

    Returns:
      A `NormForward`.

    Raises:
      TypeError: an array has another dtype.
      ValueError: shapes do not fit, or x is larger than `row_tiling.MOST_ROWS` by `MOST_COLUMNS`.
    """
    dtype = check_float("dtype", dtype)
    check_rows(x.shape, x=x, scale=scale, bias=bias)
    keep_normalized = keep_normalized and not (scale is None and bias is None)
    rows, width = x.shape
    if x.size == 0:
        empty, rstd = jnp.zeros(x.shape, dtype), jnp.full((rows,), jnp.nan, jnp.float32)
        return NormForward(empty, rstd, empty if keep_normalized else None)
    tiling = row_tiling(rows, width, cores, sums=False)
    parameters = [p.reshape(1, width) for p in (scale, bias) if p is not None]
    matrix = jax.ShapeDtypeStruct(x.shape, dtype)
    out, rstd, *normalized = launch(
        _forward_kernel,
        name=FORWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.matrix()] + [tiling.parameter() for _ in parameters],
        out_specs=[tiling.matrix(), tiling.vector()] + [tiling.matrix()] * keep_normalized,
        out_shape=[matrix, jax.ShapeDtypeStruct((rows,), jnp.float32)] + [matrix] * keep_normalized,
        warps=tiling.warps,
        interpret=interpret,
        tiling=tiling,
        scale=scale is not None,
        bias=bias is not None,
        center=center,
        epsilon=float(epsilon),
        keep_normalized=keep_normalized,
    )(x, *parameters)
    return NormForward(out, rstd, normalized[0] if keep_normalized else None)


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
    interpret: bool = False,
) -> tuple[
    Float[Array, "rows width"], Float[Array, " width"] | None, Float[Array, " width"] | None
]:
    """Computes the gradients of `norm_forward` from its saved results in one pass.

    Args:
      kept: `[rows, width]`: `normalized`, or `out` without scale and bias or with `recover`.
      rstd: float32 `[rows]`.
      g: `[rows, width]`, the cotangent of `out`.
      scale, bias: as in the forward.
      center: True for LayerNorm, False for RMSNorm.
      x_dtype: the dtype of dx.
      recover: `kept` is the output; y = (kept - bias) / scale is computed with
        `row_norm.recovery`.
      cores: multiprocessors of the target device; None for 132. The order of the sums of parameter
        gradients depends only on this number.
      interpret: run on the CPU, without Triton.

    Returns:
      dx, `[rows, width]` in x_dtype; the gradients of scale and bias, `[width]` in their dtypes, or
      None for a parameter that is None.

    Raises:
      TypeError: an array has another dtype.
      ValueError: shapes do not fit, or kept is larger than `row_tiling.MOST_ROWS` by
        `MOST_COLUMNS`.
    """
    x_dtype = check_float("x_dtype", x_dtype)
    check_rows(kept.shape, kept=kept, rstd=rstd, g=g, scale=scale, bias=bias)
    rows, width = kept.shape
    given = [p for p in (scale, bias) if p is not None]
    if kept.size == 0:
        dx, sums = jnp.zeros(kept.shape, x_dtype), [jnp.zeros_like(p) for p in given]
    else:
        tiling = row_tiling(rows, width, cores, sums=bool(given))
        dx, *partials = launch(
            _backward_kernel,
            name=BACKWARD_NAME,
            programs=tiling.programs,
            in_specs=[tiling.matrix(), tiling.vector(), tiling.matrix()]
            + [tiling.parameter() for _ in given],
            out_specs=[tiling.matrix()] + [tiling.partial() for _ in given],
            out_shape=[jax.ShapeDtypeStruct(kept.shape, x_dtype)]
            + [jax.ShapeDtypeStruct((tiling.programs, width), jnp.float32) for _ in given],
            warps=tiling.warps,
            interpret=interpret,
            tiling=tiling,
            scale=scale is not None,
            bias=bias is not None,
            center=center,
            recover=recover,
        )(kept, rstd, g, *(p.reshape(1, width) for p in given))
        sums = [
            jnp.sum(partial, axis=0).astype(p.dtype)
            for partial, p in zip(partials, given, strict=True)
        ]
    sums = iter(sums)
    return dx, next(sums) if scale is not None else None, next(sums) if bias is not None else None
