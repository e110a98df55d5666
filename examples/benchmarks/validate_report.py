"""Plans beside measurements: differences, where they come from, and whether the ranking holds."""

from statistics import correlation, median

MIB = 2**20
#: Share of the measured peak that the plan may be off.
TARGET = 0.03


def steps(results: dict) -> dict[str, dict]:
    """By configuration: its group, "plan" and "measure", where they are known."""
    found: dict[str, dict] = {}
    for job, one in results["jobs"].items():
        stage, _, name = job.partition("/")
        if stage not in ("validate_plan", "validate_measure"):
            continue
        for record in one["records"]:
            step = {stage.removeprefix("validate_"): record, "group": record["group"]}
            found[name] = found.get(name, {}) | step
    return found


def difference(record: dict) -> dict | None:
    """The plan of a configuration against its measured peak, bytes; None without both.

    The three causes sum to measured - planned. `compiler`: the GPU's program takes more than the
    planned one, by autotuning, libraries' workspaces or another version of them. `residents`: the
    arrays before the step take more than the program's arguments: rounding, and whatever else is
    alive. `allocator`: the step took more than its program asks for: rounding, chunks that are
    not split, and what XLA's runtime and libraries allocate while it runs.
    """
    plan, measured = record.get("plan"), record.get("measure")
    if not plan or not measured or not measured["after"]:
        return None
    program, before, after = measured["program"], measured["before"], measured["after"]
    arguments, total = program["argument_size_in_bytes"], program_bytes(program)
    peak = after["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        # Compiling took as much as the step: its own peak is not known.
        return {"hidden": True, "planned": plan["peak"], "peak_before": peak}
    found = {
        "planned": plan["peak"],
        "measured": peak,
        "relative": plan["peak"] / peak - 1,
        "compiler": total - plan["peak"],
        "residents": before["bytes_in_use"] - arguments,
        "allocator": peak - before["bytes_in_use"] - (total - arguments),
        "queued": measured["end"]["peak_bytes_in_use"] - peak,
        "same_jaxpr": plan["jaxpr"] == measured["jaxpr"],
    }
    if "gpu_used" in measured and "pool_bytes" in measured["end"]:
        found["outside_the_pool"] = measured["gpu_used"] - measured["end"]["pool_bytes"]
    return found


def program_bytes(program: dict) -> int:
    """What a program allocates, with its arguments; a donated one is an output too."""
    return (
        program["argument_size_in_bytes"]
        + program["output_size_in_bytes"]
        - program["alias_size_in_bytes"]
        + program["temp_size_in_bytes"]
    )


def summary(records: dict[str, dict]) -> dict:
    """The verdict over all configurations; numbers that were not measured are None."""
    found = {name: d for name, r in records.items() if (d := difference(r)) and "relative" in d}
    worst = max(found, key=lambda name: abs(found[name]["relative"]), default=None)
    timed = [r for r in records.values() if difference(r)]
    ratios = [_ratio(record) for record in timed]
    groups = {
        group: [r for r in timed if r["group"] == group]
        for group in dict.fromkeys(r["group"] for r in timed)
    }
    return {
        "target": TARGET,
        "compared": len(found),
        "largest_difference": abs(found[worst]["relative"]) if found else None,
        "largest_at": worst,
        "within_target": abs(found[worst]["relative"]) <= TARGET if found else None,
        "measured_over_estimated": {
            "median": median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        if ratios
        else None,
        "rank_correlation": {
            group: {
                "methods": len(rows),
                "time": _rank(rows, _times),
                "peak": _rank([r for r in rows if "relative" in difference(r)], _peaks),
            }
            for group, rows in groups.items()
            if len(rows) > 1
        },
    }


def _times(record: dict) -> tuple[float, float]:
    return record["plan"]["estimated_seconds"], record["measure"]["timing"]["seconds"]


def _peaks(record: dict) -> tuple[float, float]:
    return record["plan"]["peak"], record["measure"]["after"]["peak_bytes_in_use"]


def _ratio(record: dict) -> float:
    estimated, measured = _times(record)
    return measured / estimated


def _rank(records: list[dict], numbers) -> float | None:
    """Spearman's rank correlation, 1 for the same order; None where there is none."""
    columns = list(zip(*map(numbers, records), strict=True))
    ranks = [[sorted(column).index(x) for x in column] for column in columns]
    return correlation(*ranks) if ranks and all(len(set(r)) > 1 for r in ranks) else None


def rows(records: dict[str, dict]) -> list[list[str]]:
    """A row a configuration; empty where nothing was measured."""
    causes = ("compiler", "residents", "allocator")
    out = [["planned and measured: MiB, ms", "planned", "measured", "plan is off", *causes]]
    out[0] += ["estimated", "timed", "ratio"]
    for name, record in records.items():
        plan, measured = record.get("plan"), record.get("measure")
        found, cells = difference(record) or {}, [""] * 9
        if plan:
            cells[0] = f"{plan['peak'] / MIB:,.0f}"
            cells[6] = f"{plan['estimated_seconds'] * 1e3:.1f}"
        if "hidden" in found:
            cells[1] = "hidden"
        elif found:
            cells[1] = f"{found['measured'] / MIB:,.0f}"
            cells[2] = f"{found['relative']:+.2%}"
            cells[3:6] = (f"{found[cause] / MIB:+,.1f}" for cause in causes)
        if measured and measured["after"]:  # a time of a CPU means nothing
            cells[7] = f"{measured['timing']['seconds'] * 1e3:.1f}"
            cells[8] = f"{_ratio(record):.2f}" if plan else ""
        # The step was another when it was planned.
        other = not found.get("same_jaxpr", True)
        out.append([name + " (another program)" * other, *cells])
    return out
