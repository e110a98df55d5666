"""What `lm.patch` saves in models that others wrote: the Flax models of `transformers` 4.55.

    python examples/benchmarks/third_party.py

compiles loss and gradients of each model (4 layers, bf16, all parameters trained) for an H200, no
GPU needed: as it comes, with all blocks in `lm.compress`, and with this library's operators. What
is compared is what XLA allocates beyond arguments and results. Writes `results/third_party.json`
and a table; some 10 minutes on 2 cores.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import transformers
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions

import lowmembp_jax as lm

OUTPUT = Path(__file__).parent / "results" / "third_party.json"
DEVICE = "h200"
LAYERS = 4


class Model(NamedTuple):
    """A model of `transformers`, by the name in front of "Config", and its input."""

    blocks: str  # the module paths of its blocks
    sizes: dict[str, Any]
    batch: int = 32
    tokens: int = 256


_ENCODER = {
    "hidden_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_DECODER = {**_ENCODER, "intermediate_size": 2112, "vocab_size": 32000}
MODELS = {
    "Bert": Model("encoder/layer/*", _ENCODER),
    "Roberta": Model("encoder/layer/*", _ENCODER),
    "Electra": Model("encoder/layer/*", {**_ENCODER, "embedding_size": 768}),
    "ViT": Model("encoder/layer/*", {**_ENCODER, "image_size": 224, "patch_size": 14}),
    "GPT2": Model("h/*", {"n_embd": 768, "n_layer": LAYERS, "n_head": 12}),
    "Llama": Model("layers/*", _DECODER, 8, 1024),
    "Mistral": Model("layers/*", {**_DECODER, "num_key_value_heads": 4}, 8, 1024),
    "Gemma": Model("layers/*", {**_DECODER, "head_dim": 64, "num_key_value_heads": 12}, 8, 1024),
}
#: Settings of `lm.patch`.
METHODS: dict[str, dict[str, Any]] = {
    "compress": {},
    "compress, int8": {"compress_dtype": jnp.int8},
    "lowmembp_jax": {},
}


def peak(name: str, method: str | None) -> int:
    """Bytes beyond arguments and results of a step that gives loss and gradients."""
    kind = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**kind.sizes)
    build = getattr(transformers, f"Flax{name}Model")
    model = build(config, dtype=jnp.bfloat16, _do_init=False)
    if name == "ViT":
        x: Any = jnp.zeros((kind.batch, 3, 224, 224), jnp.bfloat16)
        shape = (kind.batch, 224, 224, 3)
    else:
        x, shape = jnp.zeros((kind.batch, kind.tokens), jnp.int32), (1, 8)
    params = jax.eval_shape(lambda key: model.init_weights(key, shape), jax.random.key(0))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)

    def loss(params, x):
        return jnp.mean(jnp.square(model(x, params=params)[0].astype(jnp.float32)))

    settings = {} if method is None else METHODS[method]
    if method and method.startswith("compress"):
        settings = {"compress": kind.blocks, **settings}

    def step(params, x):
        if method is None:
            return jax.value_and_grad(loss)(params, x)
        with lm.patch(**settings) as report:
            result = jax.value_and_grad(loss)(params, x)
        assert len(report.swapped.get("compress", range(LAYERS))) == LAYERS, report
        return result

    # XLA 0.10.2 finds no tiles for a product of the ViT in a kernel of Triton's.
    options = {"xla_gpu_enable_triton_gemm": False} if name == "ViT" else None
    compiled = lm.memory.compile_for(step, params, x, device=DEVICE, compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "versions": {**versions(), "transformers": transformers.__version__},
        "layers": LAYERS,
        "rows": {},
    }
    for name in sys.argv[1:] or MODELS:
        row = result["rows"][name] = {"plain": peak(name, None)}
        for method in METHODS:
            row[method] = peak(name, method)
            print(name, method, f"{row[method] / row['plain']:.2f} of plain", flush=True)
        write_json(OUTPUT, result)
    rows = [["MiB beyond arguments and results", "plain", *METHODS]]
    for name, row in result["rows"].items():
        others = (f"{row[m] / 2**20:,.0f} ({row[m] / row['plain']:.2f})" for m in METHODS)
        rows.append([name, f"{row['plain'] / 2**20:,.0f}", *others])
    print(table(rows))


if __name__ == "__main__":
    main()
