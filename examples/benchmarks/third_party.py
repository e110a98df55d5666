"""Measures the memory that `lm.patch` saves in the Flax models of `transformers` 4.55.

    python examples/benchmarks/third_party.py

compiles the loss and gradients of each model (4 layers, bf16, not scanned) for an H200. You need no
GPU. Each model runs unchanged, with this library's operators, and with all blocks in `lm.compress`;
with all parameters trained, and with LoRA on query and value. The script compares the memory that
XLA allocates beyond arguments and results. It writes `results/third_party.json` after each model,
and prints a table. This takes some 30 minutes on 2 cores.
"""

import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import qwix
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from results import FOLDER, markdown, versions, write_json

import lowmembp_jax as lm

OUTPUT = FOLDER / "third_party.json"
DEVICE = "h200"
LAYERS = 4


class Model(NamedTuple):
    """A model of `transformers` and its input. Its name is the part before "Config"."""

    blocks: str  # the module paths of its blocks
    sizes: dict[str, Any]
    batch: int = 32
    tokens: int = 256


_SIZES = {"hidden_size": 768, "num_hidden_layers": LAYERS, "num_attention_heads": 12}
_ENCODER = {**_SIZES, "intermediate_size": 3072}
_DECODER = {**_SIZES, "intermediate_size": 2112, "vocab_size": 32000}
_NEO = {"hidden_size": 768, "num_layers": LAYERS, "num_heads": 12}
_NEO |= {"attention_types": [[["global"], LAYERS]]}
_IMAGES = {"image_size": 224, "patch_size": 14}
MODELS = {
    "Bert": Model("encoder/layer/*", _ENCODER),
    "Roberta": Model("encoder/layer/*", _ENCODER),
    "Electra": Model("encoder/layer/*", {**_ENCODER, "embedding_size": 768}),
    "DistilBert": Model("transformer/layer/*", {"dim": 768, "n_layers": LAYERS, "n_heads": 12}),
    "ViT": Model("encoder/layer/*", {**_ENCODER, **_IMAGES}),
    "CLIPVision": Model("vision_model/encoder/layers/*", {**_ENCODER, **_IMAGES}),
    "GPT2": Model("h/*", {"n_embd": 768, "n_layer": LAYERS, "n_head": 12}),
    "GPTNeo": Model("h/*", _NEO),
    "OPT": Model("decoder/layers/*", {**_SIZES, "ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "GPTJ": Model("h/*", {"n_embd": 768, "n_layer": LAYERS, "n_head": 12, "rotary_dim": 32}),
    "RobertaPreLayerNorm": Model("encoder/layer/*", _ENCODER),
    "Dinov2": Model("encoder/layer/*", {**_SIZES, **_IMAGES}),
    "Llama": Model("layers/*", _DECODER, 8, 1024),
    "Mistral": Model("layers/*", {**_DECODER, "num_key_value_heads": 4}, 8, 1024),
    "Gemma": Model("layers/*", {**_DECODER, "head_dim": 64, "num_key_value_heads": 12}, 8, 1024),
}
#: Settings of `lm.patch`.
METHODS: dict[str, dict[str, Any]] = {
    "operators": {"norm_dtype": jnp.bfloat16},
    "compress": {},
    "compress, int8": {"compress_dtype": "int8"},
}
TRAINED = ("full", "LoRA")
_LORA = r".*/(query|value|q_proj|v_proj|q_lin|v_lin|q|v|c_attn)"


def peak(name: str, train: str, method: str | None) -> int:
    """Returns the bytes beyond arguments and results that loss and gradients take."""
    kind = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**kind.sizes)
    build = getattr(transformers, f"Flax{name}Model")
    model = build(config, dtype=jnp.bfloat16, _do_init=False)
    if "image_size" in kind.sizes:
        x: Any = jnp.zeros((kind.batch, 3, 224, 224), jnp.bfloat16)
        shape = (kind.batch, 224, 224, 3)
    else:
        x, shape = jnp.zeros((kind.batch, kind.tokens), jnp.int32), (1, 8)
    if train == "LoRA":
        provider = qwix.LoraProvider([qwix.LoraRule(module_path=_LORA, rank=8, alpha=16.0)])
        model._module = qwix.apply_lora_to_model(model.module, provider)
    params = jax.eval_shape(lambda key: model.init_weights(key, shape), jax.random.key(0))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
    flat = flatten_dict(params)
    is_trained = {at: train == "full" or "lora" in at[-1] for at in flat}
    assert any(is_trained.values()), flat.keys()
    trained, frozen = ({at: flat[at] for at in flat if is_trained[at] == is_} for is_ in (1, 0))

    def loss(trained, frozen, x):
        params = unflatten_dict(trained | frozen)
        return jnp.mean(jnp.square(model(x, params=params)[0].astype(jnp.float32)))

    def step(trained, frozen, x):
        if method is None:
            return jax.value_and_grad(loss)(trained, frozen, x)
        blocks = {"compress": kind.blocks} if method.startswith("compress") else {}
        with lm.patch(**blocks, **METHODS[method]) as report:
            result = jax.value_and_grad(loss)(trained, frozen, x)
        assert len(report.swapped.get("compress", range(LAYERS))) == LAYERS, report
        return result

    # The XLA of jaxlib 0.10.2 finds no tiles for one of the ViT's products in a Triton kernel.
    options = {"xla_gpu_enable_triton_gemm": False} if "image_size" in kind.sizes else None
    compiled = lm.memory.compile_for(
        step, trained, frozen, x, device=DEVICE, compiler_options=options
    )
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    result: dict[str, Any] = {"device": DEVICE, "versions": versions(), "layers": LAYERS}
    result["rows"] = {}
    for name in sys.argv[1:] or MODELS:
        for train in TRAINED:
            row = result["rows"].setdefault(name, {})[train] = {"plain": peak(name, train, None)}
            for method in METHODS:
                row[method] = peak(name, train, method)
                print(name, train, method, f"{row[method] / row['plain']:.3f}", flush=True)
            write_json(OUTPUT, result)
    for train in TRAINED:
        rows = [[f"{train}, MiB beyond arguments and results", "plain", *METHODS]]
        for name, trained in result["rows"].items():
            row = trained[train]
            others = (f"{row[m] / 2**20:,.0f} ({row[m] / row['plain']:.2f})" for m in METHODS)
            rows.append([name, f"{row['plain'] / 2**20:,.0f}", *others])
        print(markdown(rows))


if __name__ == "__main__":
    main()
