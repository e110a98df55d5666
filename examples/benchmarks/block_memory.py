"""Measures the memory that a transformer block saves for its backward pass, by method.

    python examples/benchmarks/block_memory.py

compiles a ViT-B-like encoder (`encoder.py`) for an H200, once per method, trained part and layout
of the layers. You need no GPU. It writes `results/block_memory.json` and prints a table: the peaks
that XLA assigns, the bytes that the kernels of 4 blocks move, the number of kernels, and a roofline
estimate of their time. This takes some 15 minutes on 2 cores. Give names of methods from
`encoder.py` to measure only these again; the file retains the other rows.
"""

import argparse
import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lowmembp_examples.benchmarks import encoder
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import markdown
from lowmembp_examples.benchmarks.stages import versions

import lowmembp_jax as lm

OUTPUT = Path(__file__).parent / "results" / "block_memory.json"
DEVICE = "h200"


def measure(method: str, train: encoder.Train, scan: bool) -> dict[str, Any]:
    step, arguments = encoder.training_step(method, train, scan, 4)
    compiled = lm.memory.compile_for(step, *arguments, device=DEVICE)
    four = compiled.memory_analysis().temp_size_in_bytes
    twelve = encoder.peak_bytes(method, train, scan, 12, device=DEVICE)
    cost = lm.memory.cost(compiled, lm.memory.get_device(DEVICE))
    return {
        "method": method,
        "train": train,
        "layers": "scan" if scan else "unrolled",
        # Blocks 5 to 12 only: with fewer blocks XLA's peak may be elsewhere.
        "block_units": round((twelve - four) / 8 / encoder.UNIT, 3),
        "peak_mib_12_blocks": round(twelve / 2**20, 1),
        "estimated_ms_4_blocks": round(cost.estimated_seconds * 1e3, 3),
        "moved_units_a_block": round(cost.bytes_moved / 4 / encoder.UNIT, 2),
        "kernels_a_block": cost.launches / 4,
    }


def cells(rows: list[dict]) -> list[list[str]]:
    columns = list(dict.fromkeys((row["train"], row["layers"]) for row in rows))
    out = [["units a block (MiB for 12)", *map(", ".join, columns)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        texts = {}
        for row in (row for row in rows if row["method"] == method):
            text = f"{row['block_units']:.2f} ({row['peak_mib_12_blocks']:.0f})"
            texts[row["train"], row["layers"]] = text
        out.append([method, *(texts.get(column, "") for column in columns)])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    methods = parser.parse_args().methods or list(encoder.METHODS)
    if unknown := set(methods) - encoder.METHODS.keys():
        parser.error(
            f"METHOD: expected names from {', '.join(encoder.METHODS)}, got {sorted(unknown)}"
        )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "compiled_only": True,
        "batch": encoder.BATCH,
        "tokens": encoder.TOKENS,
        "unit_bytes": encoder.UNIT,
        "versions": versions(),
    }
    rows: dict[tuple, dict[str, Any]] = {}
    before = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    if before.get("versions") == result["versions"]:
        rows = {tuple(row.values())[:3]: row for row in before["rows"]}
    for method, train, scan in product(methods, encoder.LORA_TARGETS, (False, True)):
        row = measure(method, train, scan)
        rows[tuple(row.values())[:3]] = row
        print(*row.values(), flush=True)
        write_json(OUTPUT, {**result, "rows": [*rows.values()]})
    print(markdown(cells([*rows.values()])))


if __name__ == "__main__":
    main()
