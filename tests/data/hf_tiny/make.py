"""Makes the tiny Hugging Face checkpoints beside it, with what PyTorch computes from them.

    pip install torch transformers==4.55.4
    python tests/data/hf_tiny/make.py [NAME ...]

Made with torch 2.15.0, and the decoders from `llama_rope` on with 2.13.0; no network, a few seconds
on a CPU. For each of `CASES` a directory with

    config.json         as `save_pretrained` writes it
    model.safetensors   float32, under Hugging Face's tensor names
    io.npz              in.<argument of forward>, logits, loss, grad.<tensor name>

Dropout is off (`eval()`), attention is the eager one, everything is float32. Values are drawn, not
trained, so that no mistake hides: norm scales around 1 and norm biases around 0 with a spread of
0.3, other biases with 0.1, matrices with 0.75 / sqrt(inputs). Texts of BERT and RoBERTa have
padding on the right and BERT's two token types. Some cases are here for what the plain ones leave
out:

    llama_gqa     2 key-value heads for 4 query heads, head tied to the embedding
    llama_rope    the rotary positions of Llama 3.1 and later, head tied to the embedding
    qwen3         norms of queries and keys, a head size of its own
    gemma2        every other layer sees a window of 5 tokens, low soft caps
    gemma3_text   two kinds of rotary positions; all layers except the second see windows
    swin_padded   maps of 9 x 9 and 5 x 5 patches: padded to the windows of 4, and before merging

The same machine and versions give the same bytes; others the same values within rounding.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

_LAYERS = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
_TEXT = {**_LAYERS, "vocab_size": 120}
_BERT = {**_TEXT, "max_position_embeddings": 40, "num_labels": 3}
_ROBERTA = {**_BERT, "max_position_embeddings": 42, "type_vocab_size": 1}
_LLAMA = {**_TEXT, "max_position_embeddings": 64}
_GQA = {"num_key_value_heads": 2, "tie_word_embeddings": True}
_DECODER = {**_LLAMA, "hidden_size": 24, "intermediate_size": 40}
_DECODER |= {"num_key_value_heads": 2, "head_dim": 8}
_ROPE = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
_ROPE |= {"original_max_position_embeddings": 32}
_ROTATED = {"tie_word_embeddings": True, "rope_theta": 100.0, "rope_scaling": _ROPE}
_GEMMA = {**_DECODER, "query_pre_attn_scalar": 12, "sliding_window": 5}
_SOFT_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
_TWO_ROPES = {"rope_theta": 1000.0, "rope_local_base_freq": 10.0, "sliding_window_pattern": 2}
_TWO_ROPES |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 3}
_IMAGE = {"image_size": 32, "num_labels": 5}
_SWIN = {"patch_size": 2, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_PADDED = {**_IMAGE, **_SWIN, "image_size": 18}

#: Directory name -> architecture, config, seed.
CASES = {
    "bert": ("BertForSequenceClassification", hf.BertConfig(**_BERT), 1),
    "roberta": ("RobertaForSequenceClassification", hf.RobertaConfig(**_ROBERTA), 2),
    "llama": ("LlamaForCausalLM", hf.LlamaConfig(**_LLAMA), 3),
    "llama_gqa": ("LlamaForCausalLM", hf.LlamaConfig(**_LLAMA, **_GQA), 4),
    "llama_rope": ("LlamaForCausalLM", hf.LlamaConfig(**_DECODER, **_ROTATED), 8),
    "qwen3": ("Qwen3ForCausalLM", hf.Qwen3Config(**_DECODER), 9),
    "gemma2": ("Gemma2ForCausalLM", hf.Gemma2Config(**_GEMMA, **_SOFT_CAPS), 10),
    "gemma3_text": ("Gemma3ForCausalLM", hf.Gemma3TextConfig(**{**_GEMMA, **_TWO_ROPES}), 11),
    "vit": ("ViTForImageClassification", hf.ViTConfig(**_IMAGE, **_LAYERS, patch_size=8), 5),
    "swin": ("SwinForImageClassification", hf.SwinConfig(**_IMAGE, **_SWIN, embed_dim=24), 6),
    "swin_padded": ("SwinForImageClassification", hf.SwinConfig(**_PADDED, embed_dim=16), 7),
}


def fill(model: torch.nn.Module, generator: np.random.Generator) -> None:
    """Draws every parameter, in the order of their names."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = generator.standard_normal(parameter.shape)
            if "norm" in name.lower() and parameter.ndim == 1:
                # Gemma's norms multiply by 1 + scale.
                is_gemma = model.config.model_type.startswith("gemma")
                value = 0.3 * value + (name.endswith("weight") and not is_gemma)
            elif parameter.ndim == 1:
                value = 0.1 * value
            else:
                value = 0.75 * value / np.sqrt(parameter[0].numel())
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))


def make_inputs(config, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Arguments of `forward`: three examples."""
    if isinstance(config, (hf.ViTConfig, hf.SwinConfig)):
        size = config.image_size
        pixels = generator.standard_normal((3, config.num_channels, size, size))
        return {
            "pixel_values": pixels.astype(np.float32),
            "labels": generator.integers(config.num_labels, size=3),
        }
    if isinstance(config, (hf.LlamaConfig, hf.Qwen3Config, hf.Gemma2Config, hf.Gemma3TextConfig)):
        # PyTorch leaves the gradient of the padding's embedding out; Gemma's padding is token 0.
        first = 0 if config.pad_token_id is None else config.pad_token_id + 1
        ids = generator.integers(first, config.vocab_size, size=(3, 19))
        # The model shifts the labels itself.
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    mask = (np.arange(17) < np.array([[17], [11], [5]])).astype(np.int64)
    # Ids from 5 on: below are the special ones, that of padding among them.
    ids = generator.integers(5, config.vocab_size, size=mask.shape)
    inputs = {
        "input_ids": np.where(mask == 1, ids, config.pad_token_id),
        "attention_mask": mask,
        "labels": generator.integers(config.num_labels, size=3),
    }
    if config.type_vocab_size > 1:
        types = (np.arange(17) >= 8).astype(np.int64)
        inputs["token_type_ids"] = np.broadcast_to(types, mask.shape)
    return inputs


def make(directory: Path, architecture: str, config, seed: int) -> None:
    """Writes the three files of one case."""
    generator = np.random.default_rng(seed)
    config._attn_implementation = "eager"
    model = getattr(hf, architecture)(config).eval()
    fill(model, generator)
    model.save_pretrained(directory)  # before `forward`, which writes into the config
    (directory / "generation_config.json").unlink(missing_ok=True)
    inputs = make_inputs(config, generator)
    output = model(**{name: torch.tensor(value) for name, value in inputs.items()})
    output.loss.backward()
    np.savez_compressed(
        directory / "io.npz",
        logits=output.logits.detach().numpy(),
        loss=output.loss.detach().numpy(),
        **{f"in.{name}": value for name, value in inputs.items()},
        **{f"grad.{name}": p.grad.numpy() for name, p in model.named_parameters()},
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(Path(__file__).parent / name, *CASES[name])
