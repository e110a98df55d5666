"""What a transformer block keeps for its backward, beside the strongest alternatives.

    python examples/benchmarks/block_memory.py

compiles a ViT-B-like encoder (`encoder.py`) for an H200, no GPU needed, once per method, trained
part and layout of the layers, and writes the peaks that XLA assigns to
`results/block_memory.json` and a table. Some 15 minutes on 2 cores. Methods, by their names in
`encoder.py`, measure those alone again, and keep the other rows.
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
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions

OUTPUT = Path(__file__).parent / "results" / "block_memory.json"
DEVICE = "h200"


def measure(method: str, train: encoder.Train, scan: bool) -> dict[str, Any]:
    four, twelve = (
        encoder.peak_bytes(method, train, scan, layers, device=DEVICE) for layers in (4, 12)
    )
    return {
        "method": method,
        "train": train,
        "layers": "scan" if scan else "unrolled",
        # From the fourth on: with fewer XLA may have its peak elsewhere.
        "block_units": round((twelve - four) / 8 / encoder.UNIT, 3),
        "peak_mib_12_blocks": round(twelve / 2**20, 1),
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
        parser.error(f"no method {sorted(unknown)}; there are {', '.join(encoder.METHODS)}")
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "compiled_only": True,
        "batch": encoder.BATCH,
        "tokens": encoder.TOKENS,
        "unit_bytes": encoder.UNIT,
        "versions": versions(),
        "rows": [],
    }
    before = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    if before.get("versions") == result["versions"]:
        result["rows"] = [row for row in before["rows"] if row["method"] not in methods]
    for method, train, scan in product(methods, encoder.LORA_TARGETS, (False, True)):
        result["rows"].append(measure(method, train, scan))
        print(*result["rows"][-1].values(), flush=True)
        write_json(OUTPUT, result)
    print(table(cells(result["rows"])))


if __name__ == "__main__":
    main()
