"""Prints the results of `on_gpu.py` in tables.

python examples/benchmarks/report.py results/gpu/on_gpu.json
"""

import argparse
import json
import re
from pathlib import Path
from statistics import correlation

Rows = list[list[str]]
_MIB = 2**20
_NUMBER = re.compile(r"\d|$")


def markdown(rows: Rows) -> str:
    """Formats rows as a Markdown table; right-aligns columns whose cells begin with digits."""
    columns = zip(*rows[1:], strict=True)
    rules = ("---:" if all(map(_NUMBER.match, c)) and any(c) else "---" for c in columns)
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]]) + "\n"


def checks(results: dict) -> Rows:
    """Checks that passed and the largest error, by stage and implementation."""
    found: dict[tuple[str, str], list[dict]] = {}
    for job, one in results["jobs"].items():
        stage = job.partition("/")[0]
        for record in one["records"] if stage in ("kernels", "attention") else ():
            found.setdefault((stage, record["implementation"]), []).append(record)
    rows = [["check", "implementation", "passed", "largest relative error"]]
    for (stage, implementation), records in found.items():
        worst = [float(r["errors"][0]) for r in records if r["status"] == "checked"]
        passed = f"{sum(r['passed'] for r in records)} of {len(records)}"
        rows.append([stage, implementation, passed, f"{max(worst):.1e}" if worst else ""])
    return rows


def steps(results: dict) -> dict[str, dict]:
    """Returns the records of each whole step, under "plan" and "measure"."""
    found: dict[str, dict] = {}
    for job, one in results["jobs"].items():
        stage, _, name = job.partition("/")
        for record in one["records"] if stage in ("plan", "measure") else ():
            found.setdefault(name, {})[stage] = record
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
    arguments, peak = program["argument"], after["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        return {"hidden": True}  # Compiling took as much, so the step's own peak is unknown.
    # A donated argument is also an output.
    total = arguments + program["output"] - program["alias"] + program["temp"]
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
    """Planned and measured memory in MiB and times in ms."""
    causes = ("compiler", "residents", "allocator")
    head = ["training step", "planned MiB", "measured MiB", "plan is off", *causes]
    rows = [[*head, "estimated ms", "timed ms", "timed / estimated"]]
    for name, step in found.items():
        plan, measured = step.get("plan"), step.get("measure")
        off, cells = difference(step) or {}, [""] * 9
        if plan:
            cells[0] = f"{plan['peak'] / _MIB:,.0f}"
            cells[6] = f"{plan['estimated_seconds'] * 1e3:.1f}"
        if "hidden" in off:
            cells[1] = "hidden"
        elif off:
            cells[1:3] = f"{off['measured'] / _MIB:,.0f}", f"{off['relative']:+.2%}"
            cells[3:6] = (f"{off[cause] / _MIB:+,.1f}" for cause in causes)
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
    for rows in (checks(results), planned_and_measured(found), ranking(found)):
        if rows[1:]:
            print("", markdown(rows), sep="\n")


if __name__ == "__main__":
    main()
