"""Checks this installation: `python -m lowmembp_jax.selftest`, under a minute on a CPU.

Each operator runs against what it replaces, on a small input. A line for each check, one at the
end; the exit status is 1 where a check fails.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lowmembp_jax as lm


def _normal(shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _vjp(function, *args):
    """The value, and gradients under a cotangent that is not constant."""
    y, vjp = jax.vjp(function, *args)
    return y, vjp(_normal(y.shape, 9, y.dtype))


def _vjps(functions, *args):
    """The same of several functions, in one program, which compiles sooner."""
    return jax.jit(lambda *args: [_vjp(function, *args) for function in functions])(*args)


def _run(function, *args):
    return _vjps((function,), *args)[0]


def _near(what: str, got, expected, most: float) -> None:
    """Raises unless |got - expected| / |expected| over all arrays is at most `most`."""
    error = lm.gradient_distance(got, expected).error
    if not error <= most:  # NaN is no pass
        raise AssertionError(f"{what}: relative error {error:.2g}, at most {most:.2g} is right")


def _equal(what: str, got, expected) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True):
            raise AssertionError(f"{what}: not the same")


def check_codes() -> str:
    codes = jnp.arange(103) % 4
    packed = lm.pack_2bit(codes)
    _equal("unpack_2bit(pack_2bit(codes))", lm.unpack_2bit(packed, 103), codes.astype(jnp.uint8))
    if packed.nbytes != 26:
        raise AssertionError(f"103 codes of 2 bits are in {packed.nbytes} bytes, 26 are right")
    table = lm.REGELU2_TABLE
    x = jnp.float32([-1e3, *table.thresholds, 1e3])
    # A threshold is not above itself: the level below it holds there.
    expected = jnp.float32([table.levels[0], *table.levels[:-1], table.levels[-1]])
    _equal("slopes at the thresholds", jax.grad(lambda x: lm.regelu2(x).sum())(x), expected)
    return "103 codes in 26 bytes; slopes at every threshold"


def check_activations() -> str:
    x = _normal((64, 128))
    cases = (
        ("gelu, 2 bits", lm.gelu, jax.nn.gelu, 0.2),
        ("gelu, 4 bits", partial(lm.gelu, bits=4), jax.nn.gelu, 0.06),
        ("silu, 2 bits", lm.silu, jax.nn.silu, 0.2),
        ("silu, 4 bits", partial(lm.silu, bits=4), jax.nn.silu, 0.06),
        ("regelu2", lm.regelu2, jax.nn.gelu, 0.5),
        ("resilu2", lm.resilu2, jax.nn.silu, 0.6),
    )
    results = _vjps([ours for _, ours, _, _ in cases], x)
    plains = (jax.nn.gelu, jax.nn.silu)
    exacts = dict(zip(plains, _vjps(plains, x), strict=True))
    for (name, ours, plain, most), (y, grads) in zip(cases, results, strict=True):
        y_plain, exact = exacts[plain]
        _near(f"{name}: values", y, y_plain, 1e-6)
        _near(f"{name}: gradients", grads, exact, most)
        kept = lm.memory.saved_bytes(lambda x, ours=ours: ours(x).sum(), x)
        if kept > x.size // 2:
            raise AssertionError(f"{name} keeps {kept} bytes of {x.size} elements")
        if not math.isnan(ours(jnp.float32([math.nan]))[0]):
            raise AssertionError(f"{name}: a NaN is lost")
    return "values of gelu and silu, gradients within their tables, bytes, NaNs"


def check_gated() -> str:
    gate, up = _normal((64, 128)), _normal((64, 128), 1)
    for name, ours, act in (("swiglu", lm.swiglu, jax.nn.silu), ("geglu", lm.geglu, jax.nn.gelu)):
        got, exact = _vjps((ours, lambda gate, up, act=act: act(gate) * up), gate, up)
        _near(name, got, exact, 1e-5)
    return "values and gradients"


def _plain_norm(x, *affine, center):
    x = x - x.mean(-1, keepdims=True) if center else x
    y = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    y = y * affine[0][None] if affine else y
    return y + affine[1][None] if affine[1:] else y


def check_norms() -> str:
    x, scale, bias = 3 * _normal((64, 128)) + 1, 1 + 0.1 * _normal((128,), 1), _normal((128,), 2)
    for name, ours, center, args in (
        ("ms_layer_norm", lm.ms_layer_norm, True, (x,)),
        ("ms_layer_norm", lm.ms_layer_norm, True, (x, scale, bias)),
        ("ms_rms_norm", lm.ms_rms_norm, False, (x, scale)),
    ):
        got, exact = _vjps((ours, partial(_plain_norm, center=center)), *args)
        _near(f"{name}, {len(args)} arguments", got, exact, 1e-5)
    return "values and gradients, with and without scale and bias"


class _Block(nn.Module):
    """A model as somebody else would write it."""

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(256, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(64, name="down")(h)


def _block():
    x = _normal((128, 64))
    return _Block().init(jax.random.key(1), x), x


def _kept(apply: Callable[..., Any], params, x) -> int:
    return lm.memory.saved_bytes(lambda params, x: jnp.sum(apply(params, x)), params, x)


def check_compress() -> str:
    params, x = _block()
    y, exact = _run(_Block().apply, params, x)
    for dtype, most in (("float8", 0.06), ("int8", 0.03)):
        y_ours, grads = _run(lm.compress(_Block().apply, dtype=dtype), params, x)
        _near(f"{dtype}: values", y_ours, y, 1e-6)
        _near(f"{dtype}: gradients", grads, exact, most)
    before, after = (_kept(f, params, x) for f in (_Block().apply, lm.compress(_Block().apply)))
    if not after < before / 4:
        raise AssertionError(f"a block keeps {after} bytes, and {before} without lm.compress")
    return f"float8, int8; a block keeps {after:,} bytes, {before:,} in plain Flax"


def check_patch() -> str:
    params, x = _block()
    y, exact = _run(_Block().apply, params, x)
    with lm.patch() as report:
        y_ours, grads = _run(_Block().apply, params, x)
    if sorted(report.swapped) != ["gelu", "layer_norm"]:
        raise AssertionError(f"gelu and layer_norm are not both swapped: {report}")
    _near("values", y_ours, y, 1e-6)
    _near("gradients", grads, exact, 0.2)
    _equal("outside the patch", _run(_Block().apply, params, x), (y, exact))
    return "GELU and LayerNorm of a Flax module"


def check_flax_modules() -> str:
    x = _normal((32, 64))
    params = nn.LayerNorm().init(jax.random.key(0), x)
    expected = nn.LayerNorm().apply(params, x)
    _near("lm.MSLayerNorm", lm.MSLayerNorm().apply(params, x), expected, 1e-6)
    ours, flax = lm.nnx.MSLayerNorm(64, rngs=nnx.Rngs(0)), nnx.LayerNorm(64, rngs=nnx.Rngs(0))
    _near("lm.nnx.MSLayerNorm", ours(x), flax(x), 1e-6)
    return "linen and NNX, with Flax's parameters"


def check_merging() -> str:
    params, x = _block()
    scale, bias = 1 + _normal((64,), 4), _normal((64,), 5)
    params["params"]["norm"] = {"scale": scale, "bias": bias}
    merged = lm.merge_norm_affine(params, {"norm": ["up"]})

    def apply(params, norm):
        weights = params["params"]
        h = norm @ weights["up"]["kernel"] + weights["up"]["bias"][None]
        return x + nn.gelu(h) @ weights["down"]["kernel"] + weights["down"]["bias"][None]

    _near("merged", apply(merged, lm.ms_layer_norm(x)), _Block().apply(params, x), 1e-5)
    return "a norm's scale and bias in the next Dense"


def check_remat() -> str:
    params, x = _block()
    with_policy = jax.checkpoint(_Block().apply, policy=lm.checkpoint_policy())
    with lm.patch():
        plain, remat = _vjps((_Block().apply, with_policy), params, x)
    _near("gradients under jax.checkpoint", remat, plain, 1e-5)
    return "lm.checkpoint_policy() gives the same gradients"


def check_kernels() -> str:
    x, scale = _normal((16, 256)), 1 + 0.1 * _normal((256,), 1)
    for name, op, args in (
        ("gelu", lm.gelu, (x,)),
        ("rms_norm", lm.ms_rms_norm, (x, scale)),
    ):
        expected = _run(op, *args)
        with lm.set_implementation("pallas_interpret"):
            _near(name, _run(op, *args), expected, 1e-5)
    return "Pallas in its interpreter: gelu, rms_norm"


def check_planner() -> str:
    if missing := lm.memory.missing_wheels():
        return f"not checked, without {', '.join(missing)} (the planner extra)"
    step = jax.grad(lambda w, x: lm.gelu(x @ w).sum())
    shapes = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
    compiled = lm.memory.compile_for(step, *shapes, device="h200")
    memory = compiled.memory_analysis()
    assert memory is not None and memory.argument_size_in_bytes == 2 * 4 * 256**2, memory
    return "a step compiled for an H200"


CHECKS: dict[str, Callable[[], str]] = {
    "codes": check_codes,
    "activations": check_activations,
    "gated units": check_gated,
    "norms": check_norms,
    "compress": check_compress,
    "patch": check_patch,
    "Flax modules": check_flax_modules,
    "merging": check_merging,
    "jax.checkpoint": check_remat,
    "kernels": check_kernels,
    "planner": check_planner,
}


def main() -> int:
    """Runs all checks and prints what they found; returns the exit status."""
    start, failed = time.monotonic(), []
    for name, check in CHECKS.items():
        try:
            print(f"{name}: {check()}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    result = f"failed: {', '.join(failed)}" if failed else f"all {len(CHECKS)} passed"
    print(f"{result}, in {time.monotonic() - start:.0f} s, JAX {jax.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
