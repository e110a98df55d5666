"""The smallest model of each family that has all of its modules."""

import jax
import jax.numpy as jnp
from helpers import integers, normal

from lowmembp_jax.models import bert, llama, swin, vit

#: Two layers. Swin's second layer is shifted, and patch merging and another stage follow it.
TINY = {
    "vit": vit.ViTConfig(64, 2, 2, 256, image_size=32, patch_size=8, num_labels=8),
    "swin": swin.SwinConfig(
        32, (2, 1), (1, 2), window_size=4, image_size=32, patch_size=4, num_labels=8
    ),
    "bert": bert.BertConfig(64, 64, 2, 2, 256, 64),
    "roberta": bert.RobertaConfig(64, 64, 2, 2, 256, 66, type_vocab_size=1),
    "llama": llama.LlamaConfig(64, 2, 2, 192, num_key_value_heads=1, vocab_size=64),
}
#: Of a text.
TOKENS = 32


def inputs(family: str, batch: int = 2, config=None) -> tuple[jax.Array, ...]:
    """What the model of the family is called with."""
    config = config or TINY[family]
    if family in ("vit", "swin"):
        return (normal(batch, config.image_size, config.image_size, 3),)
    ids = integers(batch, TOKENS, low=0, high=config.vocab_size)
    decoder = family not in ("bert", "roberta")
    return (ids,) if decoder else (ids, TOKENS - jnp.arange(batch, dtype=jnp.int32))
