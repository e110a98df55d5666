"""Prints the results of `on_gpu.py` in tables, and compares them with the targets.

python examples/benchmarks/report.py results/gpu/on_gpu.json
"""

import argparse
import json
import re
from pathlib import Path
from statistics import correlation

Rows = list[list[str]]
MIB = 2**20
#: The least value of each target.
RIGHT, STEP, PEAK = TARGETS = {
    "right against float64": 1,
    "step, times default Flax": 1,
    "planned peak, 1 - relative error": 0.97,
}
_WANTED = {name: (RIGHT, STEP) for name in ("xla", "pallas", "triton")} | {"planner": (PEAK,)}
_NUMBER = re.compile(r"\d|$")


def markdown(rows: Rows) -> str:
    """Formats rows as a Markdown table; right-aligns columns whose cells begin with digits."""
    columns = zip(*rows[1:], strict=True)
    rules = ("---:" if all(map(_NUMBER.match, c)) and any(c) else "---" for c in columns)
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]]) + "\n"


def records(results: dict, stage: str, status: str) -> list[dict]:
    """Returns a stage's records that have this status."""
    jobs = results["jobs"].items()
    found = [r for job, one in jobs if job.startswith(f"{stage}/") for r in one["records"]]
    return [r for r in found if r["status"] == status]


def targets(results: dict) -> Rows:
    """A row for each target and implementation. The lowest measured value decides."""
    reached: dict[tuple[str, str], list[tuple[float, str]]] = {}

    def add(target, who, ratio, where):
        reached.setdefault((target, who), []).append((ratio, where))

    for r in records(results, "correctness", "checked"):
        add(RIGHT, r["implementation"], float(r["passed"]), f"{r['kernel']} {r['dtype']}")
    timed = records(results, "blocks", "timed")
    default = {r["model"]: r["milliseconds"] for r in timed if r["method"] == "default"}
    for r in timed:
        if r["method"] == "lowmembp_jax" and r["model"] in default:
            add(STEP, r["implementation"], default[r["model"]] / r["milliseconds"], r["model"])
    for name, whole_step in steps(results).items():
        if "relative" in (off := difference(whole_step) or {}):
            add(PEAK, "planner", 1 - abs(off["relative"]), name)

    rows = [["target", "implementation", "wanted", "lowest", "verdict", "where", "reached"]]
    for who, target in ((who, target) for who, wanted in _WANTED.items() for target in wanted):
        limit, ratios = TARGETS[target], reached.get((target, who))
        cells = ["", "not measured", "", ""]
        if ratios:
            lowest, where = min(ratios)
            count = sum(ratio >= limit for ratio, _ in ratios)
            verdict = "met" if lowest >= limit else "missed"
            cells = [f"{lowest:.3g}", verdict, where, f"{count} of {len(ratios)}"]
        rows.append([target, who, f"{limit:g}", *cells])
    return rows


def attention(results: dict) -> Rows:
    rows = [["attention, forward and backward", "dtype", "worst error", "ms", "temporary MiB"]]
    for job, one in results["jobs"].items():
        for r in one["records"] if job.startswith("attention/") else ():
            name = f"{job.partition('/')[2]}, {r['implementation']}"
            cells = [r["status"][:40], "", ""]
            if r["status"] == "checked":
                worst = max(map(float, r["errors"].values()))
                temporary = f"{r['temporary_bytes'] / MIB:.0f}"
                cells = [f"{worst:.1e}", f"{r['milliseconds']:.3f}", temporary]
            rows.append([name, r["dtype"], *cells])
    return rows


def blocks(results: dict) -> Rows:
    rows = [["blocks", "ms", "TFLOP/s", "peak MiB", "planned MiB"]]
    for r in records(results, "blocks", "timed"):
        name = ", ".join(filter(None, (r["model"], r["method"], r["implementation"])))
        peak = f"{r['peak_bytes'] / MIB:.0f}" if r["peak_is_the_step's"] else ""
        speed, planned = r["flops_a_second"] / 1e12, r["planned_bytes"] / MIB
        rows.append([name, f"{r['milliseconds']:.2f}", f"{speed:.0f}", peak, f"{planned:.0f}"])
    return rows


def steps(results: dict) -> dict[str, dict]:
    """Returns the known records of each whole step, under "plan" and "measure"."""
    found: dict[str, dict] = {}
    for job, one in results["jobs"].items():
        stage, _, name = job.partition("/")
        for record in one["records"] if stage.startswith("validate_") else ():
            found.setdefault(name, {})[stage.removeprefix("validate_")] = record
    return found


def difference(step: dict) -> dict | None:
    """Compares a step's planned peak with its measured peak, in bytes; None without both.

    Three causes sum to measured - planned:
    - `compiler`: the program on the GPU takes more than the planned program, because of autotuning,
      workspaces of libraries, or other versions of libraries.
    - `residents`: the arrays before the step take more than the program's arguments, because of
      rounding and other live arrays.
    - `allocator`: the step took more than its program requests, because of rounding, unsplit
      chunks, and allocations of XLA's runtime and libraries during the step.
    """
    plan, measured = step.get("plan"), step.get("measure")
    if not plan or not measured or not measured["after"]:
        return None
    program, before, after = measured["program"], measured["before"], measured["after"]
    arguments, peak = program["argument_size_in_bytes"], after["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        return {"hidden": True}  # Compiling took as much, so the step's own peak is unknown.
    # A donated argument is also an output.
    results = program["output_size_in_bytes"] - program["alias_size_in_bytes"]
    total = arguments + results + program["temp_size_in_bytes"]
    return {
        "planned": plan["peak"],
        "measured": peak,
        "relative": plan["peak"] / peak - 1,
        "compiler": total - plan["peak"],
        "residents": before["bytes_in_use"] - arguments,
        "allocator": peak - before["bytes_in_use"] - (total - arguments),
        "same_jaxpr": plan["jaxpr"] == measured["jaxpr"],
    }


def planned_and_measured(found: dict[str, dict]) -> Rows:
    causes = ("compiler", "residents", "allocator")
    head = ["planned and measured: MiB, ms", "planned", "measured", "plan is off", *causes]
    rows = [[*head, "estimated", "timed", "ratio"]]
    for name, step in found.items():
        plan, measured = step.get("plan"), step.get("measure")
        off, cells = difference(step) or {}, [""] * 9
        if plan:
            cells[0] = f"{plan['peak'] / MIB:,.0f}"
            cells[6] = f"{plan['estimated_seconds'] * 1e3:.1f}"
        if "hidden" in off:
            cells[1] = "hidden"
        elif off:
            cells[1:3] = f"{off['measured'] / MIB:,.0f}", f"{off['relative']:+.2%}"
            cells[3:6] = (f"{off[cause] / MIB:+,.1f}" for cause in causes)
        if measured and measured["after"]:  # Times on a CPU mean nothing.
            seconds = measured["timing"]["seconds"]
            cells[7] = f"{seconds * 1e3:.1f}"
            cells[8] = f"{seconds / plan['estimated_seconds']:.2f}" if plan else ""
        # Different jaxprs show that the step changed between plan and measurement.
        other = " (another program)" if not off.get("same_jaxpr", True) else ""
        rows.append([name + other, *cells])
    return rows


def ranking(found: dict[str, dict]) -> Rows:
    """Spearman's rank correlation of plan and measurement over the methods of a group."""
    rows = [["rank correlation, planned with measured", "methods", "time", "peak"]]
    groups: dict[str, list[dict]] = {}
    for step in found.values():
        if difference(step):
            groups.setdefault(step["plan"]["group"], []).append(step)
    for group, members in groups.items():
        known = [off for off in map(difference, members) if off and "relative" in off]
        times = [
            (s["plan"]["estimated_seconds"], s["measure"]["timing"]["seconds"]) for s in members
        ]
        peaks = [(off["planned"], off["measured"]) for off in known]
        if len(members) > 1:
            rows.append([group, str(len(members)), _correlation(times), _correlation(peaks)])
    return rows


def _correlation(pairs: list[tuple[float, float]]) -> str:
    """Formats the rank correlation; empty if the values in a column do not differ."""
    columns = list(zip(*pairs, strict=True))
    ranks = [[sorted(column).index(x) for x in column] for column in columns]
    differ = ranks and all(len(set(rank)) > 1 for rank in ranks)
    return f"{correlation(*ranks):.2f}" if differ else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="on_gpu.json")
    results = json.loads(parser.parse_args().results.read_text())
    found = steps(results)
    tables = [each(results) for each in (attention, blocks, targets)]
    for rows in (*tables, planned_and_measured(found), ranking(found)):
        if rows[1:]:
            print("", markdown(rows), sep="\n")


if __name__ == "__main__":
    main()
