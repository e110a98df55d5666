"""Names in the measured tables for the names in the JSON files in `results/`."""

#: Methods of `block_memory.json`: their names on the pages, and the parts that they recompute.
BLOCK_METHODS = {
    "default": ("Flax as it comes", "nothing"),
    "checkpointed norm and activation": ("`jax.checkpoint` around norm and GELU", "norm, GELU"),
    "dots policy": ("`jax.checkpoint`, dots policy", "norm, GELU, attention"),
    "products policy": ("`jax.checkpoint`, `lm.products_saveable`", "norm, GELU"),
    "full remat": ("`jax.checkpoint`, everything", "everything"),
    "compress": ("**`lm.compress`**", "norm, GELU"),
    "compress, attention in bfloat16": ("`lm.compress`, attention in bfloat16", "norm, GELU"),
    "lowmembp_jax": ("**the operators**", "**nothing**"),
    "compress, lowmembp_jax": (
        "the operators, in `lm.compress(policy=lm.everything_saveable)`",
        "nothing",
    ),
    "lowmembp_jax, its remat policy": (
        "the operators with `lm.checkpoint_policy()`",
        "products, attention, GELU",
    ),
}
#: Methods of `gradient_fidelity.jsonl`.
FIDELITY_METHODS = {
    "plain Flax in bfloat16": "plain Flax in bfloat16",
    "compress": "`lm.compress`",
    "compress, unscaled float8_e4m3fn": "`lm.compress`, unscaled float8_e4m3fn",
    "compress, int8": "`lm.compress`, int8",
    "compress, int4": "`lm.compress`, int4",
    "compress, inputs of layers alone": "inputs of layers alone",
    "compress, inputs alone, int8": "inputs of layers alone, int8",
    "Mesa: all that is kept, int8": "Mesa: all that the operators keep, int8",
    "operators, 2 bits as published": "`lm.regelu2`, `lm.resilu2`: 2 bits, published tables",
    "operators, 2 bits": "`lm.gelu`, `lm.silu`, 2 bits",
    "operators, 4 bits": "`lm.gelu`, `lm.silu`, 4 bits",
    "operators, 4 bits, and compress": "both: 4 bits, and `lm.compress`",
}
#: Methods of `other_models.json`.
OTHER_MODELS = {
    "plain": "Flax as it comes",
    "dots policy": "dots policy",
    "products policy": "`lm.products_saveable`",
    "full remat": "full remat",
    "compress": "**`lm.compress`**",
    "compress, int8": "the same, int8",
    "compress of full remat": "inputs of blocks alone",
    "compress, everything_saveable": "`lm.everything_saveable`",
}
#: Methods of `finetune.json` and `nnx_finetune.json` whose names contain names of the library.
FINETUNED = {
    "lm.compress": "`lm.compress`",
    "lm.compress, inputs of layers alone": "`lm.compress`, inputs of layers alone",
    "lm.nnx.compress": "`lm.nnx.compress`",
    "lm.nnx operators": "`lm.nnx.MSLayerNorm`, `lm.gelu`",
}
#: Methods of `loss_memory.json`.
LOSSES = {
    "whole logits": "plain",
    "linear_cross_entropy": "`lm.linear_cross_entropy`",
    "whole logits, compress": "plain, `lm.compress`",
    "linear_cross_entropy, compress": "**`lm.linear_cross_entropy`, `lm.compress`**",
}
ACTIVATIONS = {
    "gelu_erf": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "softplus": "softplus",
    "elu": "ELU",
    "squared_relu": "squared ReLU",
}
#: Methods of `compare.jsonl`.
COMPARE_METHODS = {
    "default": "default",
    "norm+activation": "norm+activation",
    "dots": "dots",
    "products": "products",
    "full-remat": "full-remat",
    "mesa": "mesa",
    "compress": "**compress**",
    "compress+remat": "compress+remat",
    "lowmembp": "**lowmembp**",
    "lowmembp+remat": "lowmembp+remat",
    "lowmembp+compress": "lowmembp+compress",
    "offload": "offload",
}
COMPARED = {
    "vit-b16": "ViT-B/16",
    "vit-l16": "ViT-L/16",
    "bert-base": "BERT-base",
    "bert-large": "BERT-large",
    "roberta-base": "RoBERTa-base",
    "llama-1b": "LLaMA-1B",
    "llama-7b": "LLaMA-7B",
    "llama-13b": "LLaMA-13B",
    "swin-t": "Swin-T",
    "swin-s": "Swin-S",
}
TRAINED = {
    "full": "full",
    "lora-qv": "LoRA q, v",
    "lora-all": "LoRA, all Denses",
    "qlora-all": "QLoRA, all Denses",
}
DEVICES = {"h200": "H200", "a100-80gb": "A100", "rtx4090": "RTX 4090"}
