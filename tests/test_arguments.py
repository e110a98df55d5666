"""Every argument of the public functions: nonsense is an error that names the argument."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowmembp_jax as lm

X, ONES, KERNEL = jnp.ones((4, 8)), jnp.ones(8), jnp.ones((8, 16))
TREE = {"norm": {"scale": ONES}, "dense": {"kernel": KERNEL}}


def block(params, x):
    return x + jnp.tanh(x @ params)


def loss(params, x):
    return jnp.mean(block(params, x) ** 2)


FUNCTIONS = {
    lm.gelu: dict(x=X, approximate=True, bits=2, implementation="xla"),
    lm.silu: dict(x=X, bits=2, implementation="xla"),
    lm.regelu2: dict(x=X, approximate=True, implementation="xla"),
    lm.resilu2: dict(x=X, implementation="xla"),
    lm.step_activation: dict(x=X, function=jax.nn.mish, table=lm.REGELU2_TABLE),
    lm.ms_layer_norm: dict(x=X, scale=ONES, bias=ONES, epsilon=1e-6, dtype="float32", mask=True),
    lm.ms_rms_norm: dict(x=X, scale=ONES, epsilon=1e-6, residual="auto", implementation="xla"),
    lm.swiglu: dict(gate=X, up=X, dtype="float8", implementation="xla"),
    lm.geglu: dict(gate=X, up=X, approximate=True),
    lm.linear_cross_entropy: dict(
        hidden=X, kernel=KERNEL, labels=jnp.arange(4), bias=jnp.ones(16), reduction="mean",
        logit_soft_cap=1.0, z_loss=0.0, label_smoothing=0.0, weights=jnp.ones(4), ignore_index=1,
        tile_bytes=2**20,
    ),
    lm.fit_step_table: dict(
        function=jnp.tanh, bits=2, objective="derivative", weight=1.0, keep_limits=False,
        unbiased=False,
    ),
    lm.derivative_error: dict(function=jnp.tanh, table=lm.REGELU2_TABLE, weight=1.0),
    lm.compress: dict(
        fun=block, dtype="float8", policy=lm.products_saveable, params_argnums=0, static_argnums=1,
        prevent_cse=True,
    ),
    lm.compress_checkpoints: dict(fun=block, dtype="float8", policy=None, params_argnums=0),
    lm.compress_module: dict(
        target=nn.Dense, dtype="float8", policy=lm.products_saveable, static_argnums=1,
        prevent_cse=True, methods=["__call__"],
    ),
    lm.nnx.compress: dict(
        function=lambda module, x: x, dtype="float8", policy=lm.products_saveable, prevent_cse=True
    ),
    lm.compress_state: dict(optimizer=optax.sgd(0.1, 0.9), min_size=1),
    lm.master_weights: dict(optimizer=optax.sgd(0.1)),
    lm.merge_norm_affine: dict(params=TREE, rules={"norm": "dense"}),
    lm.gradient_distance: dict(got=TREE, exact=TREE, depth=1),
    lm.pack_2bit: dict(codes=jnp.zeros(16, jnp.uint8)),
    lm.unpack_2bit: dict(packed=jnp.zeros(4, jnp.uint8), size=16),
    lm.memory.saved_bytes: dict(argnums=0),
    lm.target_platform: dict(platform="gpu"),
    lm.patch: dict(
        activations=True, bits=2, norms=True, norm_dtype="float32", norm_residual="auto",
        include="*", exclude="*", compress="*", checkpoint=True, compress_dtype="float8",
    ),
}  # fmt: skip
NONSENSE = [object(), "nonsense", np.array(["a"]), 1j, b"x", float("nan"), -3, jax.random.key(0)]
#: Values that have a meaning.
MEANINGFUL = {
    ("gelu", "x"), ("silu", "x"), ("regelu2", "x"), ("resilu2", "x"), ("step_activation", "x"),
    *[(name, "mask") for name in ("ms_layer_norm", "ms_rms_norm")],
    *[("patch", name) for name in ("include", "exclude", "compress")],
    *[("linear_cross_entropy", name) for name in ("ignore_index", "weights")],
    *[("compress", name) for name in ("params_argnums", "static_argnums")],
    ("compress_checkpoints", "params_argnums"),
    ("compress_state", "min_size"), ("pack_2bit", "codes"), ("compress_module", "static_argnums"),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nonsense_is_refused(function):
    positional = (loss, KERNEL[:, :8], X) if function is lm.memory.saved_bytes else ()
    name = function.__name__

    def call(**given):
        made = function(*positional, **given)
        if function is lm.target_platform:
            made.__enter__()

    for argument in FUNCTIONS[function]:
        for bad in NONSENSE:
            if not ((name, argument) in MEANINGFUL and isinstance(bad, float | int | str)):
                with pytest.raises((TypeError, ValueError), match=argument):
                    call(**FUNCTIONS[function] | {argument: bad})
