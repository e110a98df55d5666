"""What a transformer block keeps for its backward, beside the strongest alternatives.

    python examples/benchmarks/block_memory.py

compiles a ViT-B-like encoder (`encoder.py`) for an H200, no GPU needed, once per method, trained
part and layout of the layers, and writes the peaks that XLA assigns to
`results/block_memory.json` and a table. Some 5 minutes on 2 cores.
"""

import json
import os
import platform
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lowmembp_examples.benchmarks import encoder
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

OUTPUT = Path(__file__).parent / "results" / "block_memory.json"
DEVICE = "h200"


def measure() -> list[dict]:
    rows = []
    cases = list(product(encoder.LORA_TARGETS, (False, True), encoder.METHODS))
    for train, scan, method in tqdm(cases, unit="case", disable=None):
        two, four, twelve = (
            encoder.peak_bytes(method, train, scan, layers, device=DEVICE) for layers in (2, 4, 12)
        )
        rows.append(
            {
                "method": method,
                "train": train,
                "layers": "scan" if scan else "unrolled",
                "block_units": round((four - two) / 2 / encoder.UNIT, 3),
                "peak_mib_12_blocks": round(twelve / 2**20, 1),
            }
        )
    return rows


def table(rows: list[dict]) -> Table:
    columns = [(r["train"], r["layers"]) for r in rows if r["method"] == rows[0]["method"]]
    out = Table(title=f"Units a block (MiB for 12 blocks), compiled for {DEVICE}")
    out.add_column("method")
    for train, layers in columns:
        out.add_column(f"{train}\n{layers}", justify="right")
    for method in encoder.METHODS:
        own = [r for r in rows if r["method"] == method]
        out.add_row(
            method, *(f"{r['block_units']:.2f} ({r['peak_mib_12_blocks']:.0f})" for r in own)
        )
    return out


def main() -> None:
    rows = measure()
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "flax", "nvidia-cudnn-cu12")
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "compiled_only": True,
        "batch": encoder.BATCH,
        "tokens": encoder.TOKENS,
        "unit_bytes": encoder.UNIT,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "rows": rows,
    }
    partial = OUTPUT.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(OUTPUT)
    Console().print(table(rows))


if __name__ == "__main__":
    main()
