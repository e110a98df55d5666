"""How far two trainings drift apart that differ only in how their sums are rounded.

    python examples/benchmarks/drift.py

trains each model for 30 steps on one device and, with the same batches, on two. The two add the
same numbers in another order. A number that is next to the threshold of a code then changes sides,
and its slope by a whole level; this table says how much comes of it. Relative: the distance of the
two sets of parameters, by the way that the first has gone. A line of `results/drift.jsonl` is a
model with one method; started again, it goes on. Some 5 minutes on two CPU cores.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":  # an import leaves the devices of others alone
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )

import jax
import numpy as np
import tyro
from lowmembp_examples.benchmarks import flags, json_lines, real_models
from lowmembp_examples.benchmarks.gradient_fidelity import METHODS as OTHERS
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.models.common import Compute
from tqdm import tqdm

METHODS = {"plain Flax": Compute()} | {
    name: OTHERS[name]
    for name in (
        "compress",
        "compress, int8",
        "operators, 2 bits as published",
        "operators, 2 bits",
        "operators, 4 bits",
    )
}


@dataclasses.dataclass
class Config:
    """How far two trainings drift apart that differ only in how their sums are rounded."""

    output: Path = Path(__file__).parent / "results" / "drift.jsonl"
    """A line a method. What stands there already is not trained again."""
    model: tuple[real_models.Name, ...] = ("vit", "llama")
    """Which models."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which rows."""
    batch_size: int = 32
    """Examples a batch."""
    steps: int = 30
    """Steps of AdamW."""


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def drift(model: real_models.RealModel, compute: Compute, steps: int) -> dict[str, float]:
    """The distance of the parameters after the last step, and the greatest of the losses."""
    runs = (model.run(compute, steps, devices=devices) for devices in (1, 2))
    losses, states = 0.0, ()
    for both in tqdm(zip(*runs, strict=True), total=steps, mininterval=1):
        states, metrics = zip(*both, strict=True)
        losses = max(losses, abs(float(metrics[0].loss) - float(metrics[1].loss)))
    start, one, two = map(flat, (model.params, *(state.params for state in states)))
    distance = np.linalg.norm(one - two) / np.linalg.norm(one - start)
    return {"parameters": float(distance), "loss": losses}


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    flags.check(config, ("batch_size", "steps"), methods=METHODS)
    try:
        for name in config.model:
            model = real_models.load(name, config.batch_size)
            setting = {"model": name, "batch_size": config.batch_size, "steps": config.steps}
            for method in config.methods:
                key = setting | {"method": method}
                if tuple(key.values()) not in json_lines.keys(config.output, tuple(key)):
                    found = drift(model, METHODS[method], config.steps)
                    json_lines.append(config.output, key | found | {"versions": versions()})
            cells = [["", "parameters", "loss"]]
            for row in json_lines.read(config.output):
                if setting.items() <= row.items():
                    numbers = (f"{row[key]:.1e}" for key in ("parameters", "loss"))
                    cells.append([f"{name}, {row['method']}", *numbers])
            print(table(cells))
    except ValueError as error:
        sys.exit(f"drift.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
