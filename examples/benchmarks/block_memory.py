"""Measures the memory that a transformer block saves for its backward pass, by method.

    python examples/benchmarks/block_memory.py

compiles blocks of a ViT-B with 64 x 256 tokens (bfloat16, merged norms, cuDNN's attention) for an
H200, unrolled and scanned. You need no GPU. It writes `results/block_memory.json` after each row
and prints a table: how much memory one more block takes, in units of tokens x hidden x 2 bytes; the
temporaries of 4 blocks; the bytes that their kernels move; and a roofline estimate of their time.
This takes some 5 minutes on 2 cores. Name methods to measure only these.
"""

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
from results import FOLDER, MIB, markdown, versions, write_json

import lowmembp_jax as lm
from lowmembp_jax.models import vit
from lowmembp_jax.models.layers import Compute, Model, run_layers
from lowmembp_jax.models.methods import METHODS

OUTPUT, DEVICE = FOLDER / "block_memory.json", "h200"
BATCH, TOKENS = 64, 256
CONFIG = dataclasses.replace(vit.CONFIGS["vit-b16"], hidden_act="gelu_pytorch_tanh")
#: Bytes of one bfloat16 activation of the residual stream's shape.
UNIT = BATCH * TOKENS * CONFIG.hidden_size * 2


class Blocks(Model):
    """The blocks of a ViT."""

    @nn.compact
    def __call__(self, x):
        return run_layers(self, vit.ViTLayer, x, None)


def compiled(method: str, scan: bool, count: int) -> jax.stages.Compiled:
    """Compiles the loss and the gradients of `count` blocks."""
    compute = Compute(method, jnp.bfloat16, jnp.bfloat16, "cudnn", merged=True)
    config = dataclasses.replace(CONFIG, num_hidden_layers=count)
    model = Blocks(config, compute, scan)
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, CONFIG.hidden_size), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

    return lm.memory.compile_for(jax.value_and_grad(loss), params, x, device=DEVICE)


def temporaries(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def measure(method: str, scan: bool) -> dict[str, Any]:
    four = compiled(method, scan, 4)
    more = temporaries(compiled(method, scan, 12)) - temporaries(four)
    cost = lm.memory.cost(four, lm.memory.get_device(DEVICE))
    return {
        "method": method,
        "layers": "scan" if scan else "unrolled",
        # Blocks 5 to 12 only: with fewer blocks XLA's peak may be elsewhere.
        "units_of_a_block": more / 8 / UNIT,
        "temporaries_of_4_blocks": temporaries(four),
        "units_moved_by_4_blocks": cost.bytes_moved / UNIT,
        "estimated_seconds_of_4_blocks": cost.estimated_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", choices=[[], *METHODS], metavar="METHOD")
    rows, cells = [], [["method", "layers", "units a block", "MiB", "moved", "ms (estimate)"]]
    for method in parser.parse_args().methods or METHODS:
        for scan in (False, True):
            row = measure(method, scan)
            rows.append(row)
            write_json(OUTPUT, {"device": DEVICE, "versions": versions(), "rows": rows})
            numbers = (
                f"{row['units_of_a_block']:.2f}",
                f"{row['temporaries_of_4_blocks'] / MIB:.1f}",
                f"{row['units_moved_by_4_blocks']:.1f}",
                f"{row['estimated_seconds_of_4_blocks'] * 1e3:.3f}",
            )
            cells.append([method, row["layers"], *numbers])
            print(*cells[-1], flush=True)
    print(markdown(cells))


if __name__ == "__main__":
    main()
