"""The smallest model of each family that has all of its modules."""

import jax
import jax.numpy as jnp
from lowmembp_examples.models import bert, llama, roberta, swin, vit

#: Two layers, of which the second takes the first one's merged norm in BERT, and is shifted in
#: Swin, where patch merging and a stage more follow.
TINY = {
    "vit": vit.ViTConfig(64, 2, 2, 256, image_size=32, patch_size=8, num_labels=8),
    "swin": swin.SwinConfig(
        32, (2, 1), (1, 2), window_size=4, image_size=32, patch_size=4, num_labels=8
    ),
    "bert": bert.BertConfig(64, 64, 2, 2, 256, 64),
    "roberta": roberta.RobertaConfig(64, 64, 2, 2, 256, 66, type_vocab_size=1),
    "llama": llama.LlamaConfig(64, 2, 2, 192, num_key_value_heads=1, vocab_size=64),
}
#: Of a text.
TOKENS = 32


def inputs(family: str, batch: int = 2) -> tuple[jax.Array, ...]:
    """What the model of the family is called with."""
    config, key = TINY[family], jax.random.key(11)
    if family in ("vit", "swin"):
        return (jax.random.normal(key, (batch, config.image_size, config.image_size, 3)),)
    ids = jax.random.randint(key, (batch, TOKENS), 0, config.vocab_size)
    return (ids,) if family == "llama" else (ids, TOKENS - jnp.arange(batch, dtype=jnp.int32))
