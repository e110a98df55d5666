"""The public functions: nonsense is an error that names the argument, and JAX's flags are no error.

The flags are those that change how JAX traces.
"""

import contextlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import GELU_ERF, normal

import lowmembp_jax as lm

X, ONES, KERNEL = normal(4, 8), jnp.ones(8), normal(8, 16, key=1) / 3
W, LABELS = KERNEL[:, :8], jnp.arange(4)
PALLAS = {"implementation": "pallas_interpret"}
TREE = {"norm": {"scale": ONES}, "dense": {"kernel": KERNEL}}


def block(params, x):
    return x + jnp.tanh(x @ params)


def loss(params, x):
    return jnp.mean(block(params, x) ** 2)


def with_text(params, x):
    return {"y": x @ params, "name": "a"}


FUNCTIONS = {
    lm.gelu: dict(x=X, approximate=True, bits=2, implementation="xla"),
    lm.regelu2: dict(x=X, approximate=True, implementation="xla"),
    lm.step_activation: dict(x=X, function=jax.nn.mish, table=lm.REGELU2_TABLE),
    lm.ms_layer_norm: dict(x=X, scale=ONES, bias=ONES, epsilon=1e-6, dtype="float32", mask=True),
    lm.ms_rms_norm: dict(x=X, scale=ONES, epsilon=1e-6, residual="auto", implementation="xla"),
    lm.swiglu: dict(gate=X, up=X, dtype="float8", implementation="xla"),
    lm.linear_cross_entropy: dict(
        hidden=X, kernel=KERNEL, labels=LABELS, bias=jnp.ones(16), reduction="mean",
        logit_soft_cap=1.0, z_loss=0.0, label_smoothing=0.0, weights=jnp.ones(4), ignore_index=1,
        tile_bytes=2**20,
    ),
    lm.linear_log_probs: dict(
        hidden=X, kernel=KERNEL, labels=LABELS, bias=jnp.ones(16), temperature=1.0,
        logit_soft_cap=1.0, tile_bytes=2**20,
    ),
    lm.fit_step_table: dict(function=jnp.tanh, bits=2, objective="derivative", weight=1.0),
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
    ("gelu", "x"), ("regelu2", "x"), ("step_activation", "x"),
    *[(name, "mask") for name in ("ms_layer_norm", "ms_rms_norm")],
    *[("patch", name) for name in ("include", "exclude", "compress")],
    *[("linear_cross_entropy", name) for name in ("ignore_index", "weights")],
    *[("compress", name) for name in ("params_argnums", "static_argnums")],
    ("compress_checkpoints", "params_argnums"),
    ("compress_module", "static_argnums"),
}  # fmt: skip

ROOT = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)  # noqa: E731
LINEAR, DENSE = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nn.Dense(3)
SGD, ADAM, W16 = optax.sgd(1.0), optax.adam(1.0), W.astype(jnp.bfloat16)
WIDE, SHORT = lm.master_weights(SGD), lm.master_weights(SGD, bits=16)
BYTES = lm.compress_state(ADAM, min_size=1)
NEW = BYTES.init(W)
#: A state of an older version.
OLD = NEW._replace(scales=tuple(scale if scale is None else scale[:, :1] for scale in NEW.scales))
CALL, LAST, NONE = lambda x: x, lambda params, h: h.sum(), lambda *_: None
RESIDUALS, COMPARE = lm.memory.residuals, partial(lm.memory.compare, lambda *_: (jnp.sin, (X,)))
COMPRESS, MODULE, NNX = lm.compress, lm.compress_module, lm.nnx.compress
KEY = jax.random.key(0)
TWO, ROWS, TABLE = jnp.ones(2), jnp.ones((2, 4)), lm.REGELU2_TABLE
LOSS, KL = lm.linear_cross_entropy, lm.linear_divergence
LOGITS = {"hidden": X, "kernel": KERNEL, "labels": LABELS}
MODELS = {"hidden": X, "kernel": KERNEL, "reference_hidden": X, "reference_kernel": KERNEL}
#: Calls with one wrong argument, and the words of the error that name it.
REFUSED = [
    (LOSS, (), LOGITS | {"kernel": jnp.zeros((5, 7))}, ValueError, "kernel"),
    (LOSS, (), LOGITS | {"kernel": jnp.zeros((8, 0))}, ValueError, "kernel"),
    (LOSS, (), LOGITS | {"tile_bytes": 0}, ValueError, "tile_bytes"),
    (LOSS, (), LOGITS | {"logit_soft_cap": 0}, ValueError, "logit_soft_cap"),
    (LOSS, (), LOGITS | {"label_smoothing": 1}, ValueError, "label_smoothing"),
    (LOSS, (), LOGITS | {"embedding": jnp.zeros((9, 8))}, ValueError, "embedding"),
    (lm.linear_log_probs, (), LOGITS | {"temperature": 0}, ValueError, "temperature"),
    (KL, (), MODELS | {"kind": "js"}, ValueError, "kind"),
    (KL, (), MODELS | {"reference_hidden": X[1:]}, ValueError, "reference_hidden"),
    (KL, (), MODELS | {"reference_kernel": jnp.zeros((8, 7))}, ValueError, "reference_kernel"),
    (KL, (), MODELS | {"mask": jnp.zeros(3, bool)}, ValueError, "mask"),
    (KL, (), MODELS | {"reference_bias": jnp.zeros(3)}, ValueError, "reference_bias"),
    (lm.StepTable, ((1.0, 0.0), (0.0, 1.0, 2.0)), {}, ValueError, "thresholds"),
    (lm.StepTable, ((1.0,) * 16, (0.0,) * 17), {}, ValueError, "thresholds"),
    (lm.StepTable, ((1.0,), (0.0,)), {}, ValueError, "levels"),
    (lm.StepTable, ((1.0,), (0.0, float("inf"))), {}, ValueError, "levels"),
    (lm.step_activation, (TWO, jnp.sum, TABLE), {}, ValueError, "function"),
    (lm.step_activation, (TWO, jnp.tanh, TABLE), PALLAS, ValueError, "function"),
    (lm.geglu, (ROWS, ROWS), {"dtype": jnp.int16}, ValueError, "dtype:"),
    (lm.ms_rms_norm, (ROWS,), {"mask": ROWS[0, :3] > 0}, ValueError, "mask"),
    (lm.ms_rms_norm, (ROWS,), {"mask": ROWS > 0} | PALLAS, ValueError, "mask"),
    (lm.fit_step_table, (GELU_ERF,), {"weight": [1.0, np.nan]}, ValueError, "weight"),
    (lm.fit_step_table, (GELU_ERF,), {"weight": [1.0, 2.0]}, ValueError, "weight"),
    (lm.fit_step_table, (jnp.log,), {}, ValueError, "function: .* value"),
    (lm.fit_step_table, (ROOT,), {}, ValueError, "function: .* derivative"),
    (lm.fit_step_table, (jnp.tanh,), {"objective": "function"}, ValueError, "function"),
    (lm.patch, (), {"activations": False, "norms": False}, ValueError, "activations.*norms"),
    (lm.patch, (True,), {}, TypeError, "function: .*got True.*settings by name"),
    (COMPRESS, (block,), {"dtype": jnp.float16}, ValueError, "dtype: .*int8.*, got .*float16"),
    (COMPRESS, (block,), {"dtype": {3: "int8"}}, TypeError, "dtype: .*as keys, got 3"),
    (COMPRESS, (block,), {"static_argnums": True}, TypeError, "static_argnums: .*got True"),
    (COMPRESS, (block,), {"offload": "disk"}, ValueError, "offload: expected 'pinned_host'"),
    (COMPRESS, (DENSE,), {}, TypeError, r"class Dense; .*lm.compress_module\(Dense\)"),
    (COMPRESS, (nnx.Linear,), {}, TypeError, r"NNX module Linear; .*lm.nnx.compress"),
    *[
        (COMPRESS(block, params_argnums=numbers), (W, X), {}, ValueError, f"2 posi.*, got {bad}")
        for numbers, bad in ((2, 2), ((0, 5), 5), (-3, -3))
    ],
    (COMPRESS(block), (), {"params": W, "x": X}, ValueError, "got 0, where the call has keywords"),
    (COMPRESS(block, static_argnums=0), (3, X), {}, ValueError, "static_argnums=0 both hold 0"),
    (COMPRESS(with_text), (W, X), {}, TypeError, r"function \S*with_text at .*\.py:\d+ .*'name'"),
    (MODULE(nn.Dense, static_argnums=9)(3).init, (KEY, X), {}, ValueError, "2 posit.*, got 9"),
    (MODULE, (nn.Dense,), {"static_argnums": 0}, ValueError, "from 1 on .*got 0"),
    (NNX, (LINEAR,), {}, TypeError, r"write lm.nnx.compress\(lambda module, x"),
    (lm.gradient_fidelity, (3, TWO), {}, TypeError, "loss: expected a function, got 3"),
    (lm.gradient_fidelity, (jnp.sum, TWO), {"bits": 2}, ValueError, "swap nothing: it"),
    (lm.nnx.compress(CALL, static_argnums=4), (LINEAR, TWO), {}, ValueError, "2 posit.*, got 4"),
    (lm.compress_checkpoints(loss, params_argnums=2), (W, X), {}, ValueError, "params_argnums"),
    (BYTES.update, (W, ADAM.init(W), W), {}, TypeError, "compress_state: state"),
    (BYTES.update, (W, OLD, W), {}, ValueError, "compress_state: state"),
    (lm.decompress_state, (ADAM.init(W),), {}, TypeError, "decompress_state: state"),
    (WIDE.update, (W16, WIDE.init(W16)), {}, ValueError, "params"),
    (WIDE.update, (W16, SGD.init(W16), W16), {}, TypeError, "master_weights: state"),
    (WIDE.update, (W16, SHORT.init(W16), W16), {}, ValueError, "state: .* state of .* 24 bits"),
    (SHORT.update, (W16, WIDE.init(W16), W16), {}, ValueError, "state: .* state of .* 16 bits"),
    (lm.master_weights, (SGD,), {"bits": 8}, ValueError, "bits: expected 24 or 16, got 8"),
    (RESIDUALS, (lambda p: p["w"], {"w": "a"}), {}, TypeError, r"p\['w'\] must be an .*got str"),
    (RESIDUALS, (CALL, jnp.arange(3)), {}, TypeError, "in x: .* got x: int32"),
    (RESIDUALS, (lambda: jnp.ones(()),), {}, TypeError, "in the arguments: .* got no arrays"),
    (RESIDUALS, (lambda x: x.astype(int), TWO), {}, TypeError, r"got int32\[2\]"),
    (RESIDUALS, (jnp.sin, TWO), {"argnums": 1}, ValueError, "argnums: .* the 1 arguments, got 1"),
    (COMPARE, (), {"methods": "dots"}, ValueError, "methods must be .* names, got 'dots'"),
    (COMPARE, (), {"find_largest_batch": True}, ValueError, "needs a batch to start from"),
    (COMPARE, (), {"batch_multiple": 0}, ValueError, "batch_multiple must be at least 1, got 0"),
    (lm.memory.compare, (NONE, ["default"]), {}, ValueError, "must return a lm.memory.Workload"),
    (lm.memory.compare, (3, ["default"]), {}, TypeError, "step_factory must be callable, got 3"),
    (COMPARE, (), {"budget": 0}, ValueError, "budget.*above 0"),
    (lm.update_in_backward, (block, SGD), {"dtype": "f9"}, ValueError, "dtype: expected None or"),
    (lm.update_in_backward(LAST, SGD).forward, (W[None], X), {}, TypeError, "carry"),
    (lm.update_in_backward, (None, SGD), {}, TypeError, "block: expected a function"),
    (lm.update_in_backward, (block, None), {}, TypeError, "optimizer: expected an optax"),
]


@pytest.mark.parametrize(("function", "args", "options", "error", "words"), REFUSED)
def test_errors_name_the_argument(function, args, options, error, words):
    with pytest.raises(error, match=rf"\b{words}(?!\w)"):
        function(*args, **options)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nonsense_is_refused(function):
    positional = (loss, W, X) if function is lm.memory.saved_bytes else ()
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


@contextlib.contextmanager
def checks():
    """All that JAX can check; conftest.py makes promotion strict."""
    with jax.debug_nans(True), jax.debug_infs(True), jax.checking_leaks():
        yield


FLAGS = {
    "checks": checks,
    "x64": lambda: jax.enable_x64(True),
    "typed keys": lambda: jax.enable_custom_prng(True),
    "no jit": jax.disable_jit,
}


def both(function, *args):
    return jax.jit(jax.value_and_grad(function, tuple(range(len(args)))))(*args)


def patched():
    with lm.patch(checkpoint=True):
        return both(jax.checkpoint(lambda w, x: jnp.sum(jax.nn.gelu(block(w, x)))), W, X)


def module():
    dense = lm.compress_module(nn.Dense)(8)
    params = dense.init(jax.random.PRNGKey(0), X)
    return jax.grad(lambda p: jnp.sum(jnp.tanh(dense.apply(p, X))))(params)


def of_nnx():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    run = lm.nnx.compress(lambda layer, x: jnp.tanh(layer(x)))
    return nnx.grad(lambda layer: jnp.sum(run(layer, X)))(layer)


def trained(optimizer, dtype=jnp.float32):
    def steps():
        params = {"w": W.astype(dtype), "bias": jnp.zeros(8, dtype)}
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return steps


def layerwise():
    layers = lm.update_in_backward(block, optax.sgd(0.1), dtype="float8")
    stack = jnp.stack([W, W])
    h, inputs = layers.forward(stack, X)
    return layers.backward(stack, layers.init(stack), inputs, h)


def with_dropout(w, x, key):
    return x @ w * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)


CALLS = {
    "compress": lambda: both(lm.compress(loss), W, X),
    "compress, no policy": lambda: both(lm.compress(loss, policy=None, dtype="int8"), W, X),
    "compress_checkpoints": lambda: both(
        lm.compress_checkpoints(jax.checkpoint(loss, policy=lm.products_saveable)), W, X
    ),
    "patch": patched,
    "compress_module": module,
    "nnx.compress": of_nnx,
    "operators": lambda: both(
        lambda x: jnp.sum(lm.swiglu(lm.ms_layer_norm(x, ONES, ONES), lm.gelu(x))), X
    ),
    "linear_cross_entropy": lambda: both(
        lambda x, w: lm.linear_cross_entropy(x, w, LABELS), X, W
    ),
    "linear_log_probs": lambda: both(
        lambda x, w: jnp.sum(lm.linear_log_probs(x, w, LABELS).entropy), X, W
    ),
    "tiled": lambda: jax.grad(
        lambda w: jnp.sum(lm.tiled(with_dropout, axis=0, size=2)(w, X, jax.random.PRNGKey(0)))
    )(W),
    "compress_state": trained(lm.compress_state(optax.sgd(0.1, momentum=0.9))),
    "master_weights": trained(lm.master_weights(optax.lion(0.1), bits=16), jnp.bfloat16),
    "update_in_backward": layerwise,
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "flag"),
    [(call, "checks") for call in CALLS]
    + [(call, "x64") for call in ("compress", "operators", "linear_cross_entropy")]
    + [("compress_state", "x64")]
    + [(call, "no jit") for call in ("compress", "operators", "tiled")]
    + [(call, "typed keys") for call in ("compress", "tiled", "nnx.compress")],
)
def test_a_function_under_a_flag(call, flag):
    with FLAGS[flag]():
        found = jax.tree.leaves(CALLS[call]())
    assert found
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in found)
