"""Step time and peak memory of whole MLP and transformer blocks, one method a process.

    python blocks.py "lowmembp_jax" pallas

prints one line of JSON a model. `kernels.py` starts it: the peak is that of a process's whole
life. Forward and backward of unrolled layers as in `encoder.py`: bf16, 64 x 256 tokens.
"""

import argparse
import json
from functools import partial

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks import encoder
from lowmembp_examples.benchmarks.compiling import reason
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, time_calls

import lowmembp_jax as lm

#: The MLP needs less memory and comes first: the transformer's peak is then its own.
MODELS = ("mlp", "transformer")
LAYERS = 4
#: Rows and layers of the MLP where there is no GPU, to see that all runs.
SMOKE_ROWS, SMOKE_LAYERS = 8, 2


def _mlp_layer(method: encoder.Method, x, weights: dict):
    """Dense, activation, Dense around a norm and a residual, `[batch, tokens, hidden]`."""
    y = encoder.dense(method.norm(x), "fc1", weights)
    return x + encoder.dense(method.activation(y), "fc2", weights)


def mlp(method: str, layers: int, rows: int):
    """Loss and gradients of a stack of MLPs, and abstract arguments."""
    run = encoder.METHODS[method].wrap(partial(_mlp_layer, encoder.METHODS[method]))

    def loss(layers, x):
        for weights in layers:
            x = run(x, weights)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    weights = {name: encoder.parameters("full")[0][name] for name in ("fc1", "fc2")}
    x = jax.ShapeDtypeStruct((1, rows, encoder.HIDDEN), encoder.DTYPE)
    return jax.value_and_grad(loss), ([weights] * layers, x)


def transformer(method: str, layers: int):
    """Loss and gradients of the encoder, and abstract arguments."""
    return encoder.training_step(method, "full", scan=False, layers=layers)


def matmul_flops(model: str, layers: int, rows: int) -> int:
    """Of a step: 2 a weight and row forward and twice that backward, attention likewise."""
    weights = 2 * encoder.HIDDEN * encoder.FFN
    if model == "mlp":
        return 6 * layers * rows * weights
    weights += 4 * encoder.HIDDEN**2
    return 6 * layers * rows * (weights + 2 * encoder.TOKENS * encoder.HIDDEN)


def _random(shapes, factor: float, seed: int):
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        (factor * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def _peak() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def measure(model: str, method: str, smoke: bool) -> dict:
    layers = SMOKE_LAYERS if smoke else LAYERS
    rows = SMOKE_ROWS if smoke else encoder.BATCH * encoder.TOKENS
    step, shapes = mlp(method, layers, rows) if model == "mlp" else transformer(method, layers)
    effort = SMOKE if smoke else Effort(batch_seconds=0.2, batches=7)
    compiled = jax.jit(step).lower(*shapes).compile()
    args = *_random(shapes[:-1], 0.03, 0), _random(shapes[-1], 1.0, 1)
    before = _peak()
    jax.block_until_ready(compiled(*args))
    peak = _peak()
    timed = time_calls(lambda i: compiled(*args), effort)
    loss = float(compiled(*args)[0])
    sizes = compiled.memory_analysis()
    flops = matmul_flops(model, layers, rows)
    return {
        "status": "timed" if loss == loss else "failed: the loss is NaN",
        "layers": layers,
        "rows": rows,
        "milliseconds": timed["seconds"] * 1e3,
        "quartiles": [t * 1e3 for t in timed["quartiles"]],
        "peak_bytes": peak,
        # Of compiling, or of the model before: then the step's own peak is below it, not known.
        "peak_is_the_step's": peak is not None and peak > before,
        "planned_bytes": sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes,
        "matmul_flops": flops,
        "flops_a_second": flops / timed["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=encoder.METHODS)
    parser.add_argument("implementation", choices=[*lm.IMPLEMENTATIONS, "none"])
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    implementation = None if options.implementation == "none" else options.implementation
    for model in MODELS:
        record = {"model": model}
        try:
            if model == "transformer" and options.smoke:
                raise RuntimeError("cuDNN attention needs a GPU")
            with lm.set_implementation(implementation):
                record |= measure(model, options.method, options.smoke)
        except Exception as error:  # out of memory, say: the other model goes on
            record["status"] = f"failed: {reason(error)}"
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
