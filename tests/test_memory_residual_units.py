"""Residuals of the ViT block of examples/benchmarks/encoder.py against those that LowMemoryBP
(arXiv:2406.16282) counts by hand; LLaMA's are in test_decoders.py.

In units of tokens x hidden x 16 bit. The paper counts one saved input an operation, norm inputs in
float32; JAX's own `jax.nn.gelu` and a plain LayerNorm save more, and in `jax.checkpoint` just that:

                            ViT block     LoRA on q and v: frozen Denses save no input
    norm 1                  2             2    input, float32
    q, k, v Denses          1             1    input, shared
    attention               4             4    q, k, v, output
    output Dense            1                  input
    norm 2                  2             2
    fc1                     1                  input
    activation              4             4    input of GELU
    fc2                     4                  input
                           19            13

The output Dense reads the array that attention saves, as it contracts over (heads, size): one less,
18. This library's norms save nothing but their outputs, which the Denses behind them save already
(-4), and the activation 2 bits in place of 16 (4 -> 0.5): 10.5. With LoRA the second norm's output
is shared by no Dense: 0 + 1 + 4 + 1 + 0.5 = 6.5.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from lowmembp_examples.benchmarks.encoder import HEADS, HIDDEN, METHODS, RANK, block, parameters
from lowmembp_examples.models.attention import attention

import lowmembp_jax as lm

LAYERS, ROWS = 3, 2 * 16
UNIT = ROWS * HIDDEN * 2
STREAM = jax.ShapeDtypeStruct((2, 16, HIDDEN), jnp.float32)
PAPER, OURS = "checkpointed norm and activation", "lowmembp_jax"


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch, mixed_dtypes):
    """Attention of examples/models saves q, k, v, its output and a float32 logsumexp a row."""
    chunked = lambda q, k, v, implementation: attention(q, k, v, "chunked")  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", chunked)


def table(method: str, train: str) -> lm.memory.Residuals:
    """Residuals of `LAYERS` blocks under scan."""
    run = partial(block, METHODS[method], "cudnn")
    stack = lambda s: jax.ShapeDtypeStruct((LAYERS, *s.shape), s.dtype)  # noqa: E731
    trained, frozen = jax.tree.map(stack, parameters(train))

    def scanned(trained, frozen, x):
        return lax.scan(lambda x, p: (run(x, p), None), x, (trained, frozen))[0]

    return lm.memory.residuals(scanned, trained, frozen, STREAM, argnums=0)


@pytest.mark.parametrize(
    ("method", "train", "pairs", "units"),
    [
        (PAPER, "full", 0, 18),
        (OURS, "full", 0, 10.5),
        (PAPER, "lora-all", 6, 18),
        (OURS, "lora-all", 6, 10.5),
        (PAPER, "lora-qv", 2, 13),
        (OURS, "lora-qv", 2, 6.5),
    ],
)
def test_units_of_the_paper(method, train, pairs, units):
    a_block = round(units * UNIT)
    a_block += ROWS * HEADS * 4  # logsumexp of the attention, float32
    a_block += pairs * ROWS * RANK * 2  # x A, input of B, bf16
    if method == OURS:
        a_block += 2 * ROWS * 4  # rstd of two norms, float32
    assert table(method, train).total_bytes == LAYERS * a_block


@pytest.mark.sample(1)
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("method", [PAPER, OURS])
def test_stacks_of_the_compiled_loop(method):
    """The forward's while loop in XLA's program for an H200 carries just the table's stacks."""
    layers = 7  # no other axis has this length: weights are the same for all layers here

    def loss(weights, x):
        def body(x, _):
            return block(METHODS[method], "cudnn", x, (weights, {})), None

        return jnp.mean(lax.square(lax.scan(body, x, length=layers)[0]))

    args = parameters("full")[0], STREAM
    compiled = lm.memory.compile_for(jax.grad(loss), *args)
    forward = next(line for line in compiled.as_text().splitlines() if " while(" in line)
    types = re.findall(rf"(\w+)\[{layers}((?:,\d+)+)\]", forward.split(" while(")[0])
    bits = {"u2": 2, "u16": 16, "bf16": 16, "f32": 32}
    elements = [layers * math.prod(map(int, dims[1:].split(","))) for _, dims in types]
    carried = sum(n * bits[t] // 8 for n, (t, _) in zip(elements, types, strict=True))
    stacks = [r.bytes for r in lm.memory.residuals(loss, *args, argnums=0).kept if r.times > 1]
    assert carried == sum(stacks) and len(types) == len(stacks)
