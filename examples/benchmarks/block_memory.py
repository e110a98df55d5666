"""What a transformer block keeps for its backward, beside the strongest alternatives.

    python examples/benchmarks/block_memory.py

compiles a ViT-B-like encoder (`encoder.py`) for an H200, no GPU needed, once per method, trained
part and layout of the layers, and writes the peaks that XLA assigns to
`results/block_memory.json` and a table. Some 5 minutes on 2 cores.
"""

import os
import sys
from itertools import product
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lowmembp_examples.benchmarks import encoder
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions

OUTPUT = Path(__file__).parent / "results" / "block_memory.json"
DEVICE = "h200"


def measure() -> list[dict]:
    rows = []
    for train, scan, method in product(encoder.LORA_TARGETS, (False, True), encoder.METHODS):
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
        print(*rows[-1].values(), flush=True)
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    own = [[r for r in rows if r["method"] == method] for method in encoder.METHODS]
    out = [["units a block (MiB for 12)", *(f"{r['train']}, {r['layers']}" for r in own[0])]]
    for each in own:
        numbers = (f"{r['block_units']:.2f} ({r['peak_mib_12_blocks']:.0f})" for r in each)
        out.append([each[0]["method"], *numbers])
    return out


def main() -> None:
    rows = measure()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "compiled_only": True,
        "batch": encoder.BATCH,
        "tokens": encoder.TOKENS,
        "unit_bytes": encoder.UNIT,
        "versions": versions(),
        "rows": rows,
    }
    write_json(OUTPUT, result)
    print(table(cells(rows)))


if __name__ == "__main__":
    main()
