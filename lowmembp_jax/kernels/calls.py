"""Calls the GPU kernels on arrays of any shape and under any sharding."""

import math
import os
from collections.abc import Callable
from functools import partial
from string import ascii_lowercase

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax.kernels.implementations import only_on_gpu
from lowmembp_jax.kernels.partitioning import Partitioned
from lowmembp_jax.operators.codes import StepTable
from pallas_kernels import interface


def _prepare(kernel: Callable, implementation: str, **static) -> Callable:
    """Makes the kernel a function of arrays only, for the device that JAX compiles for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    cores = getattr(device, "num_cores", None)
    kernel = partial(kernel, implementation=implementation, cores=cores, **static)
    if implementation == "pallas_interpret":
        return kernel
    if implementation == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return kernel
    return only_on_gpu(kernel, implementation)


def _axes(rank: int) -> str:
    """Axis names for `Partitioned`: a letter for each leading axis, and `m` for the last axis."""
    return "abcdefgh"[: rank - 1] + "m"


def activation_forward(
    x: Array, function: str, table: StepTable, implementation: str
) -> tuple[Array, Array]:
    """Returns y and the codes of x, both of x's shape; the codes have `table.dtype`."""
    static = dict(function=function, thresholds=table.thresholds)
    kernel = _prepare(interface.activation_forward, implementation, **static)

    def local(x):
        y, packed = kernel(x)
        codes = lax.bitcast_convert_type(packed, table.dtype)
        return y, codes.reshape(codes.size)[: x.size].reshape(x.shape)

    axes = ascii_lowercase[: x.ndim]
    y, codes = Partitioned(local, (axes,), (axes, axes), (None,))(x)
    return y, codes


def activation_backward(codes: Array, g: Array, table: StepTable, implementation: str) -> Array:
    """Multiplies g with the level of each code."""
    kernel = _prepare(interface.activation_backward, implementation, levels=table.levels)
    each = 8 // jnp.iinfo(table.dtype).bits  # codes in a byte

    def local(codes, g):
        # A bitcast, because `custom_partitioning` refuses constants, such as shifts.
        flat = codes.reshape(codes.size)
        if unused := -flat.size % each:
            flat = lax.pad(flat, table.dtype.type(0), [(0, unused, 0)])
        packed = lax.bitcast_convert_type(flat.reshape(flat.size // each, each), jnp.uint8)
        return (kernel(packed, g),)

    axes = ascii_lowercase[: g.ndim]
    return Partitioned(local, (axes, axes), (axes,), (None, None))(codes, g)[0]


def gated_forward(gate: Array, up: Array, function: str, implementation: str) -> Array:
    """Computes `function(gate) * up`."""
    kernel = _prepare(interface.gated_forward, implementation, function=function)
    axes = ascii_lowercase[: gate.ndim]
    run = Partitioned(lambda *arrays: (kernel(*arrays),), (axes, axes), (axes,), (None, None))
    return run(gate, up)[0]


def gated_backward(
    gate: Array, up: Array, g: Array, function: str, implementation: str
) -> tuple[Array, Array]:
    """Computes the gradients of gate and up."""
    kernel = _prepare(interface.gated_backward, implementation, function=function)
    axes = ascii_lowercase[: gate.ndim]
    d_gate, d_up = Partitioned(kernel, (axes,) * 3, (axes,) * 2, (None,) * 3)(gate, up, g)
    return d_gate, d_up


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def norm_forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    implementation: str,
    **static,
) -> tuple[Array, Array | None, Array]:
    """Returns the output, the normalized x or None, and rstd `[..., 1]`.

    Scale and bias are `[width]`.
    """
    kernel = _prepare(interface.norm_forward, implementation, **static)
    given = [p is not None for p in (scale, bias)]
    keeps = static["keep_normalized"] and any(given)

    def local(x, *parameters):
        rest = iter(parameters)
        scale, bias = (next(rest) if there else None for there in given)
        out = kernel(x.reshape(_rows(x.shape)), scale, bias)
        rstd = out.rstd.reshape(x.shape[:-1])
        normalized = (out.normalized.reshape(x.shape),) if keeps else ()
        return (out.out.reshape(x.shape), *normalized, rstd)

    axes = _axes(x.ndim)
    run = Partitioned(
        local,
        (axes, *("m" for there in given if there)),
        (axes, *(axes for _ in range(keeps)), axes[:-1]),
        (None, *(None for there in given if there)),
        whole="m",
    )
    out, *normalized, rstd = run(x, *(p for p in (scale, bias) if p is not None))
    return out, normalized[0] if keeps else None, rstd[..., None]


def norm_backward(
    kept: Array,
    rstd: Array,
    g: Array,
    scale: Array | None,
    bias: Array | None,
    implementation: str,
    **static,
) -> tuple[Array, Array | None, Array | None]:
    """Computes the gradients of x, scale and bias.

    rstd is `[..., 1]`; scale and bias are `[width]`.
    """
    kernel = _prepare(interface.norm_backward, implementation, **static)
    given = [p is not None for p in (scale, bias)]

    def local(kept, rstd, g, *parameters):
        rest = iter(parameters)
        scale, bias = (next(rest) if there else None for there in given)
        rows = _rows(kept.shape)
        dx, *sums = kernel(kept.reshape(rows), rstd.reshape(rows[0]), g.reshape(rows), scale, bias)
        return (dx.reshape(kept.shape), *(s for s in sums if s is not None))

    axes = _axes(kept.ndim)
    parameters = tuple("m" for there in given if there)
    run = Partitioned(
        local,
        (axes, axes[:-1], axes, *parameters),
        (axes, *parameters),
        (0, 0, 0, *(None for _ in parameters)),
        whole="m",
    )
    dx, *sums = run(kept, rstd[..., 0], g, *(p for p in (scale, bias) if p is not None))
    rest = iter(sums)
    d_scale, d_bias = (next(rest) if there else None for there in given)
    return dx, d_scale, d_bias
