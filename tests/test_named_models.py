"""The models that `lowmembp plan --model NAME` plans: options, updates, and every method."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import integers, normal
from tiny_models import TINY, TOKENS

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.workload import MODELS, Batch, make_optimizer, workload

pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("vit-ti16", {"tokens": 8}, "tokens: expected None, because vit takes images"),
        ("llama-tiny", {"method": "magic"}, "method: expected one of default, .* got 'magic'"),
        ("llama-tiny", {"dtype": "int8"}, "dtype: expected one of .* got 'int8'"),
        ("swin-t", {"layers": "scan"}, "layers: expected one of unrolled for swin, got 'scan'"),
        ("llama-tiny", {"tiles": 0}, "tiles: expected an integer from 1"),
        ("vit-ti16", {"tiles": 8}, "tiles: expected None, because vit is no decoder"),
        ("llama-tiny", {"update": "backward", "method": "offload"}, "update: .* method 'offload'"),
        # Updates in the backward are for equal layers.
        ("gemma-2-2b", {"update": "backward"}, r"update: .*, because .* not scanned or"),
        ("llama-tiny", {"update": "backward", "layers": "unrolled"}, "update: .* not scanned or"),
    ],
)
def test_bad_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        MODELS[model](**options)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_compressed_optimizer_state():
    options = {"optimizer_state": "8bit", "master_weights": "24bit"}
    small, large = MODELS["vit-ti16"](**options).args, MODELS["vit-ti16"]().args
    assert nbytes(small[0]) == nbytes(large[0]) / 2 and nbytes(small[1]) < nbytes(large[1]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_an_update_in_the_backward(tied):
    """The same parameters as after a step with all gradients, without clipping."""
    family = FAMILIES["llama"]
    config = dataclasses.replace(family.toy, tie_word_embeddings=tied, num_hidden_layers=2)
    make = partial(workload, family, config, batch=2, tokens=8, dtype="float32", layers="scan")
    work = make(update="backward")
    keys = itertools.count()
    draw = lambda x: 0.1 * normal(*x.shape, key=next(keys), dtype=x.dtype)  # noqa: E731
    stack, first, last = jax.tree.map(draw, work.args[0])
    ids = integers(2, 8, low=0, high=config.vocab_size)
    batch = Batch((ids,), ids)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), work.args[1])
    new, _, loss = jax.jit(work.step)((stack, first, last), zeros, batch)
    params = {"layers": stack, **first, **last}
    value, grads = jax.jit(jax.value_and_grad(make().loss))(params, batch)
    optimizer = make_optimizer(clips=False)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    want = optax.apply_updates(params, updates)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    got = {"layers": new[0], **new[1], **new[2]}
    moved = [jax.tree.map(jnp.subtract, one, params) for one in (got, want)]
    assert lm.gradient_distance(*moved).error < 2e-2  # the sign of a gradient near 0


BY_DEFAULT = [("llama", "lowmembp+remat"), ("vit", "compress")]
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(TINY, lm.memory.METHODS)
]


def matrix_flops(cost, phase):
    """The FLOPs of the model's products. LLaMA's loss computes its gradients in the forward."""
    return sum(
        kernel.flops * kernel.count
        for kernel in cost.kernels
        if kernel.kind == "matrix product"
        and kernel.phase == phase
        and "linear_cross_entropy" not in kernel.op_name
    )


@pytest.mark.compiled
@pytest.mark.parametrize(("family", "method"), CASES)
def test_every_family_with_every_method(family, method):
    """The planner's step, compiled for an H200 without a GPU."""
    tokens = None if family in ("vit", "swin") else TOKENS
    # The batch is so large that activations take more than weights.
    made = workload(FAMILIES[family], TINY[family], batch=64, method=method, tokens=tokens)
    # No GPU can time any product. JAX 0.12 compiles several of each all the same; 0.11 must.
    options = {} if jax.__version__.startswith("0.11.") else {"xla_gpu_autotune_level": 0}
    given = {"donate_argnums": made.donate_argnums, "keep_unused": True}
    program = lm.memory.compile_for(made.step, *made.args, compiler_options=options, **given)
    cost = lm.memory.cost(program, lm.memory.get_device("h200"))
    memory, state = program.memory_analysis(), made.args[:2]
    # The state goes where it was, in place, and only the loss comes out beside it.
    specs = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert specs(program.out_info[:2]) == specs(state)
    assert memory.alias_size_in_bytes == nbytes(state)
    assert memory.output_size_in_bytes - nbytes(state) < 4096
    attention = [kernel for kernel in cost.kernels if kernel.kind == "attention"]
    assert {kernel.phase for kernel in attention} >= {"forward", "backward"}
    # cuDNN's: XLA's own attention would be matrix products.
    assert all(kernel.opcode == "custom-call" for kernel in attention)
    # Factors have 16 bits everywhere but in the classifiers of BERT and RoBERTa.
    flops = {dtype: part.flops for dtype, part in cost.by("dtype").items() if part.flops}
    others = sum(flops.values()) - flops["bf16"]
    assert others < (0.001 if family in ("bert", "roberta") else 1e-9) * flops["bf16"]
    forward, backward, again = (
        matrix_flops(cost, phase) for phase in ("forward", "backward", "recomputation")
    )
    assert 1.95 < backward / forward < 2.1
    # The norms of BERT and RoBERTa read the last product of a layer, and train their scales.
    is_last_needed = family in ("bert", "roberta")
    least, most = {
        **dict.fromkeys(("dots", "products", "offload", "compress"), (0, 0.05)),
        **dict.fromkeys(("full-remat", "compress+remat", "compress+remat+offload"), (0.6, 1.01)),
        "lowmembp+remat": (0.25, 1.01 if is_last_needed else 0.8),
    }.get(method, (0, 0.07))
    assert least <= again / forward <= most
