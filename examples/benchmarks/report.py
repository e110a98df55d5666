"""What the results of `on_gpu.py` say, in tables and against the targets.

python examples/benchmarks/report.py results/gpu/on_gpu.json
"""

import argparse
import json
from pathlib import Path

from lowmembp_examples.benchmarks import validate_report

MIB = 2**20
#: The least of each; those of the kernels are for an x of at least so many MiB.
LARGE = 256
TARGETS = {
    "right against float64": 1,
    "share of copy bandwidth": 0.9,
    "activation forward, times the jnp path": 1.4,
    "norm backward, times the jnp path": 1.5,
    "step, times default Flax": 1,
}


def records(results: dict, stage: str, status: str) -> list[dict]:
    """Of one stage, those with this status."""
    jobs = results["jobs"].items()
    found = [r for job, one in jobs if job.startswith(f"{stage}/") for r in one["records"]]
    return [r for r in found if r["status"] == status]


def table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _name(case: dict) -> str:
    return f"{case['kernel']} {case['direction']} {case['dtype']}"


def targets(results: dict) -> list[str]:
    """A line for each target and implementation: the lowest that was reached decides."""
    right, share, forward, backward, step = TARGETS
    reached: dict[tuple[str, str], list[tuple[float, str]]] = {
        (target, who): []
        for who in ("xla", "pallas", "triton")
        for target in (TARGETS if who != "xla" else (right, step))
    }

    def add(target, who, ratio, where):
        if (target, who) in reached:
            reached[target, who].append((ratio, where))

    for r in records(results, "correctness", "checked"):
        add(right, r["contender"], float(r["passed"]), _name(r))
    large = [r for r in records(results, "kernels", "timed") if r["size_mib"] >= LARGE]
    jnp_path = {(_name(r), r["size_mib"]): r for r in large if r["contender"] == "xla"}
    for r in large:
        where = f"{_name(r)} {r['size_mib']:g} MiB"
        add(share, r["contender"], r["share_of_copy"], where)
        kind = {("forward", False): forward, ("backward", True): backward}.get(
            (r["direction"], "norm" in r["kernel"]), ""
        )
        if slower := jnp_path.get((_name(r), r["size_mib"])):
            add(kind, r["contender"], slower["microseconds"] / r["microseconds"], where)
    steps = records(results, "blocks", "timed")
    default = {r["model"]: r["milliseconds"] for r in steps if r["method"] == "default"}
    for r in steps:
        if r["method"] == "lowmembp_jax" and r["model"] in default:
            ratio = default[r["model"]] / r["milliseconds"]
            add(step, r["implementation"], ratio, f"a step of {r['model']}")
    return [_target(*key, ratios) for key, ratios in reached.items()]


def _target(target: str, who: str, ratios: list[tuple[float, str]]) -> str:
    if not ratios:
        return f"not measured: {target}, {who}"
    limit, (number, where) = TARGETS[target], min(ratios)
    verdict = "met" if number >= limit else "missed"
    count = sum(ratio >= limit for ratio, _ in ratios)
    return (
        f"{verdict}: {number:.3g} (wanted {limit:g}) {target}, {who}; in {where}, the lowest; "
        f"{count} of {len(ratios)} reach it"
    )


def attention_table(results: dict) -> str:
    rows = [["attention, forward and backward", "dtype", "worst error", "ms", "temporary MiB"]]
    for job, one in results["jobs"].items():
        for r in one["records"] if job.startswith("attention/") else ():
            name = f"{job.partition('/')[2]}, {r['implementation']}"
            cells = [r["status"][:40], "", ""]
            if r["status"] == "checked":
                worst = max(map(float, r["errors"].values()))
                cells = [f"{worst:.1e}", f"{r['milliseconds']:.3f}"]
                cells.append(f"{r['temporary_bytes'] / MIB:.0f}")
            rows.append([name, r["dtype"], *cells])
    return table(rows)


def blocks_table(results: dict) -> str:
    rows = [["blocks", "ms", "TFLOP/s", "peak MiB", "planned MiB"]]
    for r in records(results, "blocks", "timed"):
        name = ", ".join(filter(None, (r["model"], r["method"], r["implementation"])))
        peak = f"{r['peak_bytes'] / MIB:.0f}" if r["peak_is_the_step's"] else ""
        speed = f"{r['flops_a_second'] / 1e12:.0f}"
        rows.append([name, f"{r['milliseconds']:.2f}", speed, peak])
        rows[-1].append(f"{r['planned_bytes'] / MIB:.0f}")
    return table(rows)


def kernels_table(results: dict) -> str:
    """Microseconds and share of copy bandwidth."""
    cells = {
        (f"{r['size_mib']:g} MiB, {_name(r)}", r["contender"]): (
            f"{r['microseconds']:.0f} ({r['share_of_copy']:.0%})"
        )
        for r in records(results, "kernels", "timed")
    }
    contenders = list(dict.fromkeys(who for _, who in cells))
    rows = [["size of x, kernel: us (share of copy)", *contenders]]
    for kernel in dict.fromkeys(kernel for kernel, _ in cells):
        rows.append([kernel, *(cells.get((kernel, who), "") for who in contenders)])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="on_gpu.json")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    steps = validate_report.steps(results)
    parts = [table_(results) for table_ in (attention_table, blocks_table, kernels_table)]
    parts += [table(validate_report.rows(steps)), "\n".join(targets(results))]
    parts.append(json.dumps(validate_report.summary(steps), indent=1))
    print("", *parts, sep="\n\n")


if __name__ == "__main__":
    main()
