"""What the results of `kernels.py` say: targets met or missed, a table, a plot."""

from itertools import product
from pathlib import Path

#: From issue 3, for sizes of x of at least so many MiB.
LARGE = 256
COPY_SHARE, FORWARD_SPEEDUP, BACKWARD_SPEEDUP, STEP_SPEEDUP = 0.9, 1.4, 1.5, 1.0
_KERNELS_OF_OURS = ("pallas", "triton")


def _timed(results: dict, **wanted) -> list[dict]:
    return [
        case
        for case in results["cases"]
        if case["status"] == "timed" and all(case[k] == v for k, v in wanted.items())
    ]


def _name(case: dict) -> str:
    return f"{case['kernel']} {case['direction']} {case['dtype']} {case['size_mib']:g} MiB"


def _line(target: str, who: str, ratios: list[tuple[float, str]], limit: float, why: str) -> dict:
    """`ratios`: what was reached, and where. The lowest decides."""
    record = {"target": target, "contender": who, "limit": limit}
    if not ratios:
        return record | {"verdict": "not measured", "number": None, "where": why}
    number, where = min(ratios)
    reached = sum(ratio >= limit for ratio, _ in ratios)
    return record | {
        "verdict": "met" if number >= limit else "missed",
        "number": number,
        "where": f"lowest of {len(ratios)}, in {where}; {reached} reach {limit:g}",
    }


def _speedups(results: dict, implementation: str, direction: str, norm: bool) -> list:
    """Time of the jnp path over that of an implementation, for every large case of both."""
    found = []
    for case in _timed(results, contender=implementation, direction=direction):
        alike = {k: case[k] for k in ("kernel", "dtype", "size_mib")}
        jnp_path = _timed(results, contender="xla", direction=direction, **alike)
        if case["size_mib"] >= LARGE and ("norm" in case["kernel"]) == norm and jnp_path:
            found.append((jnp_path[0]["microseconds"] / case["microseconds"], _name(case)))
    return found


def targets(results: dict) -> list[dict]:
    """A record for each target of the issue and each implementation that it concerns."""
    lines = []
    for who, why in results["implementations"].items():
        reason = f"not available: {why}" if why else "nothing of it was timed"
        checks = [c for c in results["correctness"] if c["contender"] == who]
        passed = [
            (float(c["passed"]), f"{c['kernel']} {c['direction']} {c['dtype']}") for c in checks
        ]
        lines.append(_line("right against float64", who, passed, 1, reason))
        if who in _KERNELS_OF_OURS:
            large = [c for c in _timed(results, contender=who) if c["size_mib"] >= LARGE]
            shares = [(c["share_of_copy"], _name(c)) for c in large]
            of_copy = f"share of copy bandwidth, {LARGE} MiB and above"
            lines.append(_line(of_copy, who, shares, COPY_SHARE, reason))
            for text, direction, norm, limit in (
                ("activation forward: times the jnp path", "forward", False, FORWARD_SPEEDUP),
                ("norm backward: times the jnp path", "backward", True, BACKWARD_SPEEDUP),
            ):
                speedups = _speedups(results, who, direction, norm)
                lines.append(_line(text, who, speedups, limit, reason))
        steps = {
            (b["method"], b["implementation"]): b["milliseconds"]
            for b in results["blocks"]
            if b["model"] == "transformer" and b["status"] == "timed"
        }
        both = [steps.get(("default", None)), steps.get(("lowmembp_jax", who))]
        speedup = [(both[0] / both[1], "the whole step")] if all(both) else []
        text = "transformer step: times default Flax"
        lines.append(_line(text, who, speedup, STEP_SPEEDUP, reason))
    return lines


def _rows(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def table(results: dict) -> str:
    """Microseconds, and share of copy bandwidth of ours, at the size that was measured most."""
    sizes = [c["size_mib"] for c in _timed(results)]
    if not sizes:
        return "nothing was timed"
    size = max(sizes, key=lambda s: (s == LARGE, sizes.count(s)))
    cases = _timed(results, size_mib=size)
    contenders = list(dict.fromkeys(c["contender"] for c in cases))
    rows = [[f"us (share of copy), x of {size:g} MiB", *contenders]]
    for kernel, direction, dtype in dict.fromkeys(
        (c["kernel"], c["direction"], c["dtype"]) for c in cases
    ):
        alike = {"size_mib": size, "kernel": kernel, "direction": direction, "dtype": dtype}
        own = {c["contender"]: c for c in _timed(results, **alike)}
        cells = []
        for name in contenders:
            share = f" ({own[name]['share_of_copy']:.0%})" if name in own else ""
            cells.append(f"{own[name]['microseconds']:.0f}{share}" if name in own else "-")
        rows.append([f"{kernel} {direction} {dtype}", *cells])
    blocks = [["step", "ms", "peak MiB", "planned MiB"]]
    for b in results["blocks"]:
        name = f"{b['model']}: {b['method']} {b['implementation'] or ''}"
        if b["status"] != "timed":
            blocks.append([name, b["status"][:40], "-", "-"])
            continue
        peak = f"{b['peak_bytes'] / 2**20:.0f}" if b["peak_bytes"] else "-"
        blocks.append([name, f"{b['milliseconds']:.2f}", peak, f"{b['planned_bytes'] / 2**20:.0f}"])
    return _rows(rows) + "\n\n" + _rows(blocks)


_STYLES = {
    "copy": {"color": "black", "linestyle": ":", "marker": ""},
    "xla": {"color": "tab:gray", "linestyle": "--", "marker": "s"},
    "pallas": {"color": "tab:blue", "linestyle": "-", "marker": "o"},
    "pallas_interpret": {"color": "tab:blue", "linestyle": "-", "marker": "o"},
    "triton": {"color": "tab:orange", "linestyle": "-.", "marker": "^"},
}


def plot(results: dict, path: Path) -> str | None:
    """Bandwidth of our implementations against size, a panel a kernel; why not, if not."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error} (pip install matplotlib)"
    kernels = list(dict.fromkeys(c["kernel"] for c in _timed(results)))
    if not kernels:
        return "no plot: nothing was timed"
    panels = list(product(("bfloat16", "float32"), ("forward", "backward")))
    figure = Figure(figsize=(3 * len(kernels), 2.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(kernels), sharex=True, sharey=True, squeeze=False)
    top = max(c["bytes_per_second"] for c in results["copy"]) / 1e12
    for (row, (dtype, direction)), (column, kernel) in product(
        enumerate(panels), enumerate(kernels)
    ):
        axis = axes[row, column]
        axis.set_title(f"{kernel}\n{direction}, {dtype}", fontsize=8)
        lines = {"copy": results["copy"]}
        alike = {"kernel": kernel, "dtype": dtype, "direction": direction}
        for name in results["implementations"]:
            lines[name] = _timed(results, contender=name, **alike)
        for name, points in lines.items():
            points = sorted(points, key=lambda p: p["size_mib"])
            xs = [p["size_mib"] for p in points]
            ys = [p["bytes_per_second"] / 1e12 for p in points]
            axis.plot(xs, ys, label=name, markersize=4, markerfacecolor="none", **_STYLES[name])
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.15 * top)
        if row == len(panels) - 1:
            axis.set_xlabel("MiB of x")
        if column == 0:
            axis.set_ylabel("TB/s")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"{results['device']}: bytes that must move, over time")
    figure.savefig(path, dpi=110)
    return None
