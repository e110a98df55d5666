"""Labels and totals of lm.memory.residuals for a Flax model, and how the table is written."""

import csv
import inspect
import json
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm


class Block(nn.Module):
    """Of plain Flax, or with `ours` of this library."""

    ours: bool = False

    @nn.compact
    def __call__(self, x):
        ours = partial(lm.MSLayerNorm, residual="normalized")
        y = (ours if self.ours else nn.LayerNorm)(name="norm", use_bias=False)(x)
        h = nn.Dense(4 * x.shape[-1], name="intermediate")(y)
        h = lm.regelu2(h) if self.ours else nn.gelu(h)
        return x + nn.Dense(x.shape[-1], name="output")(h)


class Net(nn.Module):
    """`layers` blocks, `scan`ned or one after the other, in jax.checkpoint with a `policy`."""

    layers: int = 2
    ours: bool = False
    scan: bool = False
    policy: Callable | None = None

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, policy=self.policy, prevent_cse=False) if self.policy else Block
        if self.scan:
            body = lambda module, x: (module(x), None)  # noqa: E731
            scanned = nn.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            return scanned(block(self.ours, name="layer"), x)[0]
        for i in range(self.layers):
            x = block(self.ours, name=f"layer_{i}")(x)
        return x


INPUT = jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)


def net_table(**fields):
    model = Net(**fields)
    params = jax.eval_shape(model.init, jax.random.key(0), INPUT)
    return lm.memory.residuals(model.apply, params, INPUT, argnums=0)


def test_rows_name_op_module_line_and_readers():
    table = net_table(ours=True)
    (codes,) = (r for r in table.kept if r.op == "regelu2 codes" and "layer_1" in r.module)
    assert codes.module == "Net/layer_1" and codes.used_by == ("Net/layer_1: regelu2",)
    assert (codes.dtype, codes.shape, codes.times) == ("uint2", (2, 8, 128), 1)
    assert codes.bytes == 2 * 8 * 128 // 4
    line = inspect.getsourcelines(Block)[1] + 10  # of lm.regelu2
    assert codes.source.endswith(f"test_memory_residual_rows.py:{line}")
    (hidden,) = (r for r in table.kept if r.used_by == ("Net/layer_1/output: Dense",))
    assert hidden.op == "regelu2" and not hidden.shared


def test_totals():
    table = net_table()
    assert table.total_bytes == sum(table.by_op().values()) == sum(table.by_layer().values())
    assert {"gelu", "LayerNorm"} <= set(table.by_op())
    assert set(table.by_layer()) == {"Net/layer_0", "Net/layer_1"}
    assert set(table.by_layer(depth=1)) == {"Net"}
    assert "Net/layer_0/norm" in table.by_layer(depth=3)
    sizes = [row.bytes for row in table.kept]
    assert sizes == sorted(sizes, reverse=True)


def test_scanned_layers_keep_what_unrolled_layers_do():
    scanned = net_table(layers=5, scan=True)
    two, three = (net_table(layers=n).total_bytes for n in (2, 3))
    # Under the scan the norm's scale, a row, is stacked again in the shape it is multiplied in.
    copies = [row for row in scanned.kept if row.op == "copy of an input"]
    assert [(row.shape, row.times) for row in copies] == [((1, 1, 32), 5)]
    assert scanned.total_bytes == 5 * (three - two) + copies[0].bytes
    assert all(row.times == 5 for row in scanned.kept)
    assert all(row.module.startswith("Net/layer") for row in scanned.kept if row not in copies)


@pytest.mark.parametrize("scan", [False, True])
def test_remat_policies(scan):
    def ops(policy, ours=False):
        return [row.op for row in net_table(policy=policy, ours=ours, scan=scan, layers=3).kept]

    layers = 1 if scan else 3
    # A block keeps its input, which for the first unrolled one is an argument.
    inputs = 1 if scan else 2
    policies, words = jax.checkpoint_policies, ("codes", "output", "rstd")
    assert ops(policies.nothing_saveable) == ["add"] * inputs
    # Nobody reads the second product of the last block.
    assert sorted(ops(policies.dots_saveable)) == ["Dense"] * layers + ["add"] * inputs
    ours = ops(lm.checkpoint_policy(), ours=True)
    counts = {word: sum(op.endswith(f" {word}") for op in ours) for word in words}
    # The first unrolled norm has a gradient of its scale only, for which rstd is not needed.
    assert counts == dict.fromkeys(words, layers) | {"rstd": inputs}


def test_text_json_and_csv(tmp_path):
    table = net_table(ours=True, scan=True, layers=4)
    text = str(table)
    assert "4 x uint2[2,8,128]" in text and f"{len(table.kept)} arrays" in text
    report = json.loads(table.to_json(tmp_path / "table.json"))
    assert json.loads((tmp_path / "table.json").read_text()) == report
    assert report["total_bytes"] == table.total_bytes and report["by_op"] == table.by_op()
    assert len(report["rows"]) == len(table.rows)
    rows = list(csv.DictReader(table.to_csv(tmp_path / "table.csv").splitlines()))
    assert (tmp_path / "table.csv").read_text() == table.to_csv()
    assert sum(int(r["bytes"]) for r in rows if r["kind"] == "kept") == table.total_bytes
