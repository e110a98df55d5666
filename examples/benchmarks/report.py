"""What the results of `on_gpu.py` say, in tables and against the targets.

python examples/benchmarks/report.py results/gpu/on_gpu.json [--plot bandwidth.png]
"""

import argparse
import json
from itertools import product
from pathlib import Path

from lowmembp_examples.benchmarks import validate_report

MIB = 2**20
#: Targets, those of the kernels for an x of at least so many MiB.
LARGE = 256
COPY_SHARE, FORWARD_SPEEDUP, BACKWARD_SPEEDUP, STEP_SPEEDUP = 0.9, 1.4, 1.5, 1.0


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


def _target(target: str, who: str, limit: float, ratios: list[tuple[float, str]]) -> str:
    """`ratios`: what was reached, and where. The lowest decides."""
    if not ratios:
        return f"not measured: {target}, {who}"
    number, where = min(ratios)
    verdict = "met" if number >= limit else "missed"
    return (
        f"{verdict}: {number:.3g} (wanted {limit:g}) {target}, {who}; lowest of {len(ratios)}, in "
        f"{where}; {sum(ratio >= limit for ratio, _ in ratios)} reach it"
    )


def _name(case: dict) -> str:
    return f"{case['kernel']} {case['direction']} {case['dtype']} {case['size_mib']:g} MiB"


def targets(results: dict) -> list[str]:
    """A line for each target and each of our implementations that was run."""
    checks = records(results, "correctness", "checked")
    large = [r for r in records(results, "kernels", "timed") if r["size_mib"] >= LARGE]
    jnp_path = {_name(r): r["microseconds"] for r in large if r["contender"] == "xla"}
    steps = {
        (r["model"], r["method"], r["implementation"]): r["milliseconds"]
        for r in records(results, "blocks", "timed")
    }
    lines = []
    for who in ("xla", "pallas", "triton"):
        right = [
            (float(r["passed"]), f"{r['kernel']} {r['direction']} {r['dtype']}")
            for r in checks
            if r["contender"] == who
        ]
        lines.append(_target("right against float64", who, 1, right))
        own = [r for r in large if r["contender"] == who]
        faster = {
            direction: [
                (jnp_path[_name(r)] / r["microseconds"], _name(r))
                for r in own
                if (r["direction"], "norm" in r["kernel"]) == (direction, direction == "backward")
                and _name(r) in jnp_path
            ]
            for direction in ("forward", "backward")
        }
        if who != "xla":
            copy = f"share of copy bandwidth, {LARGE} MiB and above"
            shares = [(r["share_of_copy"], _name(r)) for r in own]
            forward, backward = "activation forward: times", "norm backward: times"
            lines += [
                _target(copy, who, COPY_SHARE, shares),
                _target(f"{forward} the jnp path", who, FORWARD_SPEEDUP, faster["forward"]),
                _target(f"{backward} the jnp path", who, BACKWARD_SPEEDUP, faster["backward"]),
            ]
        speedups = [
            (default / steps[model, "lowmembp_jax", who], f"a step of {model}")
            for (model, method, _), default in steps.items()
            if method == "default" and (model, "lowmembp_jax", who) in steps
        ]
        lines.append(_target("step: times default Flax", who, STEP_SPEEDUP, speedups))
    return lines


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
    """Microseconds and share of copy bandwidth, at the size that was measured most."""
    timed = records(results, "kernels", "timed")
    sizes = [r["size_mib"] for r in timed]
    size = max(sizes, key=lambda s: (s == LARGE, sizes.count(s)), default=LARGE)
    cells = {
        (f"{r['kernel']} {r['direction']} {r['dtype']}", r["contender"]): (
            f"{r['microseconds']:.0f} ({r['share_of_copy']:.0%})"
        )
        for r in timed
        if r["size_mib"] == size
    }
    contenders = list(dict.fromkeys(who for _, who in cells))
    rows = [[f"us (share of copy), x of {size:g} MiB", *contenders]]
    for kernel in dict.fromkeys(kernel for kernel, _ in cells):
        rows.append([kernel, *(cells.get((kernel, who), "") for who in contenders)])
    return table(rows)


def plot(results: dict, path: Path) -> None:
    """Bandwidth against size: a panel a kernel, dtype and direction, a line a contender."""
    from matplotlib.figure import Figure

    timed = records(results, "kernels", "timed")
    kernels = list(dict.fromkeys(r["kernel"] for r in timed))
    panels = list(product(("bfloat16", "float32"), ("forward", "backward")))
    figure = Figure(figsize=(3 * len(kernels), 2.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(kernels), sharex=True, sharey=True, squeeze=False)
    lines = {"copy": records(results, "kernels", "copy")}
    lines |= {
        who: [r for r in timed if r["contender"] == who] for who in ("xla", "pallas", "triton")
    }
    for (row, panel), (column, kernel) in product(enumerate(panels), enumerate(kernels)):
        axis = axes[row, column]
        axis.set_title(f"{kernel}\n{', '.join(panel)}", fontsize=8)
        for who, points in lines.items():
            known = {
                p["size_mib"]: p["bytes_per_second"] / 1e12
                for p in points
                if who == "copy" or (p["kernel"], p["dtype"], p["direction"]) == (kernel, *panel)
            }
            axis.plot(*zip(*sorted(known.items()), strict=True) if known else [], label=who)
        axis.set(xscale="log", ylim=(0, None), xlabel="MiB of x", ylabel="TB/s")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"{results['gpu']}: bytes that must move, over time")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="on_gpu.json")
    parser.add_argument("--plot", type=Path, help="an image of bandwidth against size")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    steps = validate_report.steps(results)
    parts = [table_(results) for table_ in (attention_table, blocks_table, kernels_table)]
    parts += [table(validate_report.rows(steps)), "\n".join(targets(results))]
    parts.append(json.dumps(validate_report.summary(steps), indent=1))
    print("", *parts, sep="\n\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
