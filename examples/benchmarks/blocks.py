"""Measures step time and peak memory of ViT-B and LLaMA-7B blocks, by method and implementation.

A step is the forward and backward of unrolled layers in bf16, without an optimizer; norms have no
scale and bias. The layers come from `encoder.py` and `models/llama.py`. This is a stage of
`on_gpu.py`. Each case needs its own process, because JAX reports the peak of a whole process.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks import encoder
from lowmembp_examples.benchmarks.stages import Cases, Machine
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, floats, moved_bytes, time_calls
from lowmembp_examples.models.attention import attention_platform

import lowmembp_jax as lm

if TYPE_CHECKING:
    from lowmembp_examples.models.llama import LlamaConfig


def vit(method: str, batch: int, tokens: int, layers: int, attention: str):
    """Returns loss and gradients, and the abstract arguments, weights first."""
    step, (weights, _, x) = encoder.training_step(
        method, "full", scan=False, layers=layers, rows=(batch, tokens), attention=attention
    )
    frozen = [{}] * layers
    return lambda weights, x: step(weights, frozen, x), (weights, x)


def llama(
    method: str,
    batch: int,
    tokens: int,
    layers: int,
    attention: str,
    *,
    config: "LlamaConfig | str" = "llama-7b",
    scan: bool = False,
):
    """Returns loss and gradients, and the abstract arguments, weights first."""
    # This is imported late, because reading its checkpoints needs another package.
    from lowmembp_examples.models.common import Compute
    from lowmembp_examples.models.llama import CONFIGS, LlamaLayer
    from lowmembp_examples.models.rotary import rotary_positions

    kind = "lowmembp" if "lowmembp_jax" in method else "default"
    if method.startswith(("checkpointed", "Mesa")):
        kind = "norm+activation"
    config = CONFIGS[config] if isinstance(config, str) else config
    compute = Compute(kind, encoder.DTYPE, encoder.DTYPE, attention, merged=True)
    layer = LlamaLayer(config, compute, "normalized", scan)
    rotation = rotary_positions(tokens, config.head_size, config.rope_theta)
    run = encoder.METHODS[method].wrap(
        lambda x, weights: layer.apply({"params": weights}, x, rotation)
    )

    def loss(weights, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, each: (run(x, each), None), x, weights)
        else:
            for each in weights:
                x = run(x, each)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((batch, tokens, config.hidden_size), encoder.DTYPE)
    weights = jax.eval_shape(layer.init, jax.random.key(0), x, rotation)["params"]
    return jax.value_and_grad(loss), (encoder.layers_of(weights, layers, scan), x)


#: Only the encoder has this method, because its attention has a name.
OF_VIT = "compress, attention in bfloat16"
#: By model, the function that builds a step, its batch, tokens and layers.
MODELS = {
    "ViT-B": (vit, encoder.BATCH, encoder.TOKENS, 12),
    "LLaMA-7B": (llama, 4, 2048, 2),
    "LLaMA, tiny": (partial(llama, config="llama-tiny"), 1, 8, 1),
}


def _peak() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def measure(model: str, method: str, implementation: str | None, effort: Effort) -> Iterator[dict]:
    build, batch, tokens, layers = MODELS[model]
    attention = "cudnn" if attention_platform(jax.devices()[0]) == "gpu" else "xla"
    step, shapes = build(method, batch, tokens, layers, attention)
    with lm.set_implementation(implementation):
        compiled = jax.jit(step).lower(*shapes).compile()
    leaves, tree = jax.tree.flatten(shapes)
    drawn = [floats(jnp.uint32(seed), leaf.shape, leaf.dtype) for seed, leaf in enumerate(leaves)]
    args = jax.tree.unflatten(tree, [*drawn[:-1], 50 * drawn[-1]])  # x is the last
    before = _peak()
    loss = float(compiled(*args)[0])
    peak = _peak()
    timed = time_calls(lambda _: compiled(*args), effort)
    # The forward takes 2 FLOPs per weight and row, and for each layer's attention 4 per row, token
    # and hidden unit. The backward takes twice as many.
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes[0]) if leaf.ndim > 1)
    flops = 6 * batch * tokens * (weights + layers * 2 * tokens * shapes[1].shape[-1])
    yield {
        "model": model,
        "method": method,
        "implementation": implementation,
        "size": {"batch": batch, "tokens": tokens, "layers": layers},
        "status": "timed",
        "loss": loss,
        "passed": loss == loss,
        "milliseconds": timed["seconds"] * 1e3,
        "quartiles": [t * 1e3 for t in timed["quartiles"]],
        "peak_bytes": peak,
        # Without a rise, compiling took more memory, and the step's own peak is unknown.
        "peak_is_the_step's": peak is not None and peak > before,
        "planned_bytes": moved_bytes(compiled) + compiled.memory_analysis().temp_size_in_bytes,
        "matmul_flops": flops,
        "flops_a_second": flops / timed["seconds"],
    }


def cases(machine: Machine) -> Cases:
    ours = [("lowmembp_jax", each) for each in machine.implementations]
    others = [(name, None) for name in encoder.METHODS if name not in ("default", "lowmembp_jax")]
    steps = [
        (model, *how)
        for how in (("default", None), *ours, *others)
        for model in ("ViT-B", "LLaMA-7B")
        if (model, how[0]) != ("LLaMA-7B", OF_VIT)
    ]
    effort = Effort(batch_seconds=0.2, batches=7)
    if machine.smoke:
        steps, effort = [("LLaMA, tiny", *ours[0])], SMOKE
    return {", ".join(filter(None, step)): partial(measure, *step, effort) for step in steps}
