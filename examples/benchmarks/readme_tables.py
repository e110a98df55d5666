"""Fills the README's column of step times in, from the results of `on_gpu.py`.

    python examples/benchmarks/readme_tables.py results/gpu/on_gpu.json

A row is known by its first cell. What was not measured is left empty.
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMN = "step time"
#: Methods of `encoder.py` by the README's name of them.
METHODS = {
    "Flax as it comes": "default",
    "`jax.checkpoint` around norm and GELU": "checkpointed norm and activation",
    "`jax.checkpoint`, dots policy": "dots policy",
    "`jax.checkpoint`, everything": "full remat",
    "`lm.products_saveable`": "products policy",
    "`lm.compress`": "compress",
    "lowmembp_jax": "lowmembp_jax",
    "lowmembp_jax with `lm.checkpoint_policy()`": "lowmembp_jax, its remat policy",
}


def step_times(results: dict) -> dict[str, str]:
    """Milliseconds of ViT-B's blocks by method; of our operators those of XLA, the default."""
    return {
        record["method"]: f"{record['milliseconds']:.1f} ms"
        for job, one in results["jobs"].items()
        for record in one["records"]
        if job.startswith("blocks/ViT-B,") and record["implementation"] in (None, "xla")
    }


def fill(text: str, times: dict[str, str], gpu: str) -> str:
    """The README with those times, and the GPU in the column's head.

    Raises:
      ValueError: it has no table with such a column.
    """
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if f"| {COLUMN}" in line), None)
    if head is None:
        raise ValueError(f"the README has no table with a column {COLUMN!r}")
    for number, line in enumerate(lines[head:], head):
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if number == head:
            column = next(i for i, cell in enumerate(cells) if cell.startswith(COLUMN))
            cells[column] = f"{COLUMN}, {gpu.removeprefix('NVIDIA ')}"
        elif time := times.get(METHODS.get(cells[0].strip("*"), "")):
            cells[column] = time
        else:
            continue
        lines[number] = f"| {' | '.join(cells)} |"
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="on_gpu.json")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if results.get("gpu", "none").startswith("none"):  # or a smoke run's
        print(f"{options.results}: nothing was measured, the column stays as it is")
        return
    times = step_times(results)
    options.readme.write_text(fill(options.readme.read_text(), times, results["gpu"]))
    print(f"{options.readme}: {times}")


if __name__ == "__main__":
    main()
