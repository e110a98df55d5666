"""Every family with every method: the planner's step, compiled for an H200 without a GPU."""

import itertools

import jax
import pytest
from tiny_models import TINY, TOKENS

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.workload import workload

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("jax_defaults")]

METHODS = lm.memory.METHODS
BY_DEFAULT = [("llama", "lowmembp+remat"), ("vit", "compress")]
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(TINY, METHODS)
]


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def matrix_flops(cost, phase):
    """The FLOPs of the model's products. LLaMA's loss computes its gradients in the forward."""
    return sum(
        kernel.flops * kernel.count
        for kernel in cost.kernels
        if kernel.kind == "matrix product"
        and kernel.phase == phase
        and "linear_cross_entropy" not in kernel.op_name
    )


@pytest.mark.parametrize(("family", "method"), CASES)
def test_combination(family, method):
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
