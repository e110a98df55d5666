"""finetune.py and nnx_finetune.py on a few steps, and MiniLM's hidden states."""

import json
import re
from pathlib import Path

import checkpoints
import finetune
import jax
import nnx_finetune
import numpy as np
import pytest
from test_data import TEXTS

from lowmembp_jax.models import Compute
from lowmembp_jax.models.bert import Bert


@pytest.mark.slow
def test_finetune(call, monkeypatch, capsys, tmp_path):
    # A run that Ctrl-C ends after its second method goes on with the third.
    train, trained = finetune.train, []

    def interrupted(*args):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(args)
        return train(*args)

    (tmp_path / "train.tsv").write_text(TEXTS)
    sizes = ("--max-tokens", "8", "--batch-size", "8", "--epochs", "0.5", "--no-plan")
    options = (*sizes, "--train", tmp_path / "train.tsv", "--output", tmp_path / "output")
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "train", interrupted)
        assert call(finetune.main, finetune.Config, *options) == 130
    before = json.loads((tmp_path / "output" / "results.json").read_text())["runs"]
    assert len(before) == 2 and call(finetune.main, finetune.Config, *options) == 0
    printed = capsys.readouterr()
    assert '4 of 4: lm.patch(norm_residual="output")' in printed.err and "8/8" in printed.err
    assert "Seconds: data " in printed.out and "plans" not in printed.out
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    names = [*finetune.TRAINED]
    assert [*results["runs"]] == names and before.items() < results["runs"].items()
    assert all(len(run["train_losses"]) == 2 for run in results["runs"].values())
    first = [run["train_losses"][0] for run in results["runs"].values()]
    np.testing.assert_allclose(first, first[0], rtol=1e-5)  # the forward pass is exact
    saved = results["memory"]["residual_bytes"]
    assert saved["lm.compress"] < saved[names[-1]] < saved["plain Flax"]
    assert all(name in printed.out for name in finetune.METHODS)
    assert re.search(r"lm\.compress +\| \d+\.\d% ", printed.out)
    assert (tmp_path / "output" / "results.png").stat().st_size > 10_000
    assert call(finetune.main, finetune.Config, *options, "--seed", "1") == 2
    assert "--seed: expected 0 as in" in capsys.readouterr().err


@pytest.mark.slow
def test_nnx_finetune(call, capsys, tmp_path):
    options = ("--steps", "2", "--width", "16", "--layers", "1", "--output", tmp_path / "output")
    assert call(nnx_finetune.main, nnx_finetune.Config, *options) == 0
    runs = json.loads((tmp_path / "output" / "results.json").read_text())["runs"]
    saved = {name: run["residual_bytes"] for name, run in runs.items()}
    assert saved["lm.nnx.compress"] < saved["lm.patch"] < saved["plain Flax NNX"]
    assert "method 3 of 3: lm.patch" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", finetune.TRAINED.values())
def test_hidden_states_of_minilm_are_pytorchs(method):
    _, config, params = checkpoints.load(finetune.minilm_folder(), new_labels=2)
    golden = np.load(Path(__file__).parents[1] / "data" / "minilm_small.npz")
    used = golden["attention_mask"].astype(bool)
    lengths = used.sum(1, dtype=np.int32)
    apply = jax.jit(Bert(config, Compute(method)).apply)
    hidden = apply({"params": params["bert"]}, golden["input_ids"], lengths)
    assert np.abs(hidden - golden["last_hidden_state"])[used].max() < 1e-3
