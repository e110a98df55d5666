"""Compares `lm.compress` with the policies of `jax.checkpoint` on blocks beyond transformers.

    python examples/benchmarks/other_models.py

compiles a training step of six unrolled bf16 blocks of each kind for an H200, and reports its peak
and a roofline estimate of its time. You need no GPU. For four narrow float32 blocks it computes the
gradient with `lm.compress` and without. It writes `results/other_models.json` after each kind of
block. This takes some 5 minutes on 2 cores.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from results import MIB, markdown, save
from tqdm import tqdm

import lowmembp_jax as lm

DEVICE = "h200"
LAYERS, NARROW_LAYERS = 6, 4


class Block(nn.Module):
    dtype: Any


class Bottleneck(Block):
    """ResNet's bottleneck (He et al. 2016) with the GroupNorm of BiT (Kolesnikov et al. 2020)."""

    @nn.compact
    def __call__(self, x):
        width, y = x.shape[-1], x
        for features, window in ((width // 4, 1), (width // 4, 3), (width, 1)):
            y = nn.Conv(features, (window, window), use_bias=False, dtype=self.dtype)(nn.relu(y))
            y = nn.GroupNorm(8, dtype=self.dtype)(y)
        return x + y


class UNetBlock(Block):
    """The residual block of a diffusion model's U-Net (Ho et al. 2020)."""

    @nn.compact
    def __call__(self, x):
        y = x
        for _ in range(2):
            y = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(y))
            y = nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype)(y)
        return x + y


class Recurrence(Block):
    """A gated linear recurrence by `lax.associative_scan`, as in Griffin (De et al. 2024)."""

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, 2 * x.shape[-1], dtype=self.dtype)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        gate, u = nn.silu(dense()(y)), dense()(y)
        width = u.shape[-1]
        conv = nn.Conv(width, (4,), padding="CAUSAL", feature_group_count=width, dtype=self.dtype)
        u = conv(u)
        kept = nn.sigmoid(dense()(u).astype(jnp.float32))
        new = jnp.sqrt(1 - jnp.square(kept)) * u.astype(jnp.float32)
        _, state = lax.associative_scan(
            lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (kept, new), axis=1
        )
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(gate * state.astype(self.dtype))


class Experts(Block):
    """Eight experts; each token goes to the expert with the largest score (Fedus et al. 2021)."""

    @nn.compact
    def __call__(self, x):
        count, width = 8, x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x).reshape(-1, width)
        scores = nn.softmax(nn.Dense(count, dtype=jnp.float32)(y.astype(jnp.float32)))
        chosen = jnp.argmax(scores, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = (
            self.param(name, init, (count, *shape)).astype(self.dtype)
            for name, shape in (("up", (width, 4 * width)), ("down", (4 * width, width)))
        )
        h = nn.gelu(lax.ragged_dot(y[order], up, sizes))
        y = lax.ragged_dot(h, down, sizes)[jnp.argsort(order)]
        return x + (y * jnp.max(scores, axis=-1, keepdims=True).astype(self.dtype)).reshape(x.shape)


class Kind(NamedTuple):
    block: type[Block]
    shape: tuple[int, ...]  # of the input, for compilation
    narrow: tuple[int, ...]  # of the input, for the gradient's error
    scanned: bool = False  # whether `nn.scan` runs the blocks


KINDS = {
    "ResNet bottleneck": Kind(Bottleneck, (32, 56, 56, 256), (4, 16, 16, 64)),
    "U-Net of a diffusion model": Kind(UNetBlock, (16, 64, 64, 256), (2, 16, 16, 64)),
    "gated linear recurrence": Kind(Recurrence, (16, 1024, 512), (4, 64, 64)),
    "mixture of 8 experts": Kind(Experts, (16, 1024, 512), (4, 64, 64)),
    "mixture of 8 experts, scanned": Kind(Experts, (16, 1024, 512), (4, 64, 64), scanned=True),
}
_POLICIES = jax.checkpoint_policies
METHODS: dict[str, Callable[..., type[nn.Module]]] = {
    "plain": lambda block, prevent_cse: block,
    "dots policy": partial(nn.remat, policy=_POLICIES.dots_saveable),
    "products policy": partial(nn.remat, policy=lm.products_saveable),
    "full remat": nn.remat,
    "compress": lm.compress_module,
    "compress, int8": partial(lm.compress_module, dtype="int8"),
    "compress of full remat": partial(lm.compress_module, policy=_POLICIES.nothing_saveable),
    "compress, everything_saveable": partial(lm.compress_module, policy=lm.everything_saveable),
}
#: The methods with approximate gradients.
ROUNDED = [method for method in METHODS if method.startswith("compress")]


def gradients(kind: str, method: str, layers: int, dtype: Any) -> tuple[nn.Module, Callable]:
    """Returns the model, and a function of parameters, input and target for the loss's gradient."""
    block, *_, scanned = KINDS[kind]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return block(dtype)(x), None

    layer = METHODS[method](Layer, prevent_cse=not scanned)
    if scanned:
        layer = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers
        )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for index in range(1 if scanned else layers):
                x, _ = layer(name=f"layer_{index}")(x, None)
            return x.astype(jnp.float32)

    model = Model()
    return model, jax.grad(lambda params, x, y: jnp.square(model.apply(params, x) - y).mean())


def plan(kind: str, method: str) -> lm.memory.Plan:
    """Plans a step of gradient descent."""
    model, gradient = gradients(kind, method, LAYERS, jnp.bfloat16)
    x, y = (jax.ShapeDtypeStruct(KINDS[kind].shape, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params, x, y):
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient(params, x, y))

    return lm.memory.plan(step, params, x, y, device=DEVICE, donate=0)


def error(kind: str, method: str) -> float:
    """Returns the relative error of a narrow model's gradient."""
    x, y = jax.random.normal(jax.random.key(0), (2, *KINDS[kind].narrow))
    model, exact = gradients(kind, "plain", NARROW_LAYERS, jnp.float32)
    _, rounded = gradients(kind, method, NARROW_LAYERS, jnp.float32)
    params = jax.jit(model.init)(jax.random.key(1), x)
    ours, plain = (jax.jit(gradient)(params, x, y) for gradient in (rounded, exact))
    return lm.gradient_distance(ours, plain).error


def main() -> None:
    rows: dict[str, dict[str, Any]] = {}
    table = []
    for kind in tqdm(KINDS, unit="kind"):
        row = rows[kind] = {}
        for method in METHODS:
            found = plan(kind, method)
            seconds = found.cost.estimated_seconds
            row[method] = {"peak": found.peak, "estimated_seconds": seconds}
            if method in ROUNDED:
                row[method]["error"] = error(kind, method)
        save("other_models", device=DEVICE, rows=rows)
        cells = {
            method: f"{one['peak'] / MIB:,.0f} MiB, {1e3 * one['estimated_seconds']:.2f} ms"
            + (f", {one['error']:.1%}" if "error" in one else "")
            for method, one in row.items()
        }
        table.append({"six blocks of": kind, **cells})
    print(markdown(table))


if __name__ == "__main__":
    main()
