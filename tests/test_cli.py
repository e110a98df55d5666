"""The `lowmembp` command, as a shell would run it."""

import csv
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import lowmembp_jax as lm
from lowmembp_jax import cli
from lowmembp_jax.cli._factories import load_factory

FILE = Path(__file__).parent / "data" / "planned_model.py"
gpu_compiler = pytest.mark.gpu_compiler


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch, jax_defaults):
    """A cache of its own, and JAX's defaults."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_devices(run):
    status, out, _ = run("devices")
    assert status == 0
    for name in lm.memory.DEVICES:
        assert name in out
    assert "4,800 GB/s" in out  # the H200's


def test_residuals(run, tmp_path):
    totals = {}
    for method in ("default", "lowmembp"):
        table = tmp_path / "table.json"
        status, out, _ = run(
            "residuals", "--model", f"{FILE}:loss_only", "--method", method, "--batch", 256,
            "--json", table, "--csv", tmp_path / "table.csv",
        )  # fmt: skip
        assert status == 0
        assert "Dense_0" in out
        data = json.loads(table.read_text())
        lines = (tmp_path / "table.csv").read_text().splitlines()
        assert len(list(csv.DictReader(lines))) == len(data["rows"])
        totals[method] = data["total_bytes"]
    # At least the input of each GELU, 256 x 256 in bf16, is a code of 2 bits an element.
    assert totals["default"] - totals["lowmembp"] > 2 * 256 * 256 * 2 * 0.8


def test_residuals_ask_for_the_loss(run):
    assert run("residuals", "--model", f"{FILE}:nnx_loss")[0] == 0
    for function in ("mlp", "jitted", "nnx_mlp"):
        status, _, err = run("residuals", "--model", f"{FILE}:{function}")
        assert status == 2
        assert f":{function} gives a training step: return the loss that it differentiates" in err


@gpu_compiler
def test_plan_of_a_model_of_ones_own(run, tmp_path):
    out_json, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ("plan", "--model", f"{FILE}:mlp", "--options", "width=32", "--device", "a100-40gb")
    status, out, _ = run(*arguments, "--json", out_json, "--plot", plot)
    assert status == 0
    assert "estimate" in out
    data = json.loads(out_json.read_text())
    assert [one["method"] for one in data["methods"]] == ["default", "lowmembp"]
    default, ours = (one["plan"] for one in data["methods"])
    for plan in (default, ours):
        assert plan["device"] == "a100-40gb"
        assert sum(plan["parts"].values()) == plan["peak"]
    assert ours["peak"] < default["peak"]
    assert data["versions"]["jax"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@gpu_compiler
def test_how_to_get_a_row_of_compress(run, tmp_path):
    """The note says it, and what it says works."""
    status, out, _ = run("plan", "--model", f"{FILE}:mlp", "--batch", 64)
    assert status == 0
    assert "Note: there is no row of lm.compress, because mlp takes no argument `method`" in out
    assert (
        "no row of lm.compress"
        not in run("plan", "--model", f"{FILE}:fixed", "--method", "default")[1]
    )
    target = tmp_path / "plan.json"
    status, out, _ = run("plan", "--model", f"{FILE}:with_compress", "--json", target)
    assert status == 0 and "no row of lm.compress" not in out
    default, ours = (one["plan"]["parts"] for one in json.loads(target.read_text())["methods"])
    assert ours["intermediates"] < 0.6 * default["intermediates"]


@gpu_compiler
@pytest.mark.parametrize("function", ["jitted", "nnx_mlp"])
def test_what_a_step_donates_holds_for_each_method(run, tmp_path, function):
    out_json = tmp_path / "plan.json"
    model = f"{FILE}:{function}"
    assert run("plan", "--model", model, "--batch", 8192, "--json", out_json)[0] == 0
    default, ours = (one["plan"] for one in json.loads(out_json.read_text())["methods"])
    for plan in (default, ours):
        assert plan["parts"]["outputs"] < 1024
        assert plan["parts"]["parameters"] >= 2 * 4 * 64 * 64 * 4
    assert ours["peak"] <= default["peak"]


@gpu_compiler
def test_one_method_in_detail(run, tmp_path):
    picture = tmp_path / "timeline.svg"
    plan = ("plan", "--model", f"{FILE}:fixed")
    status, out, _ = run(*plan, "--method", "lowmembp", "--timeline", picture)
    assert status == 0
    for text in ("<!-- intermediates -->", "<!-- peak ", "<!-- GiB on each device -->"):
        assert text in picture.read_text()
    for more in ((), ("--method", "lowmembp", "--device", "all")):
        status, _, err = run(*plan, "--timeline", picture, *more)
        assert status == 2 and "--timeline takes --method and one --device" in err
    status, _, err = run(*plan, "--method", "default", "--timeline", "a.txt")
    assert status == 2 and "--timeline must end in one of .png, .svg, .pdf, got a.txt" in err
    for text in ("optimizer state", "intermediates", "Largest at the peak", "planned_model.py:"):
        assert text in out


@gpu_compiler
def test_without_compiling(run, tmp_path, monkeypatch):
    def compiling(*_):
        raise AssertionError("this compiles")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    target = tmp_path / "estimate.json"
    plan = ("plan", "--no-compile", "--model", f"{FILE}:mlp", "--batch", 64)
    status, out, _ = run(*plan, "--devices", 8, "--json", target)
    assert status == 0 and "planned_model.py:mlp, batch 64, default" in out
    assert "activations, temporaries and outputs are not counted" in out
    data = json.loads(target.read_text())
    assert data["device_count"] == 8
    assert data["parts"]["parameters"]["elements"] == 2 * (64 * 256 + 256 + 256 * 64 + 64)
    assert data["parts"]["batch"]["bytes"] == 64 // 8 * 64 * 2
    assert run(*plan, "--budget", "1kB")[0] == 3
    for option in (
        ("--plot", "a.png"),
        ("--largest-batch",),
        ("--timeline", "a.png", "--method", "default"),
        ("--device", "all"),
    ):
        status, _, err = run(*plan, *option)
        assert status == 2 and f"--no-compile takes no {option[0]}" in err


@gpu_compiler
def test_the_smallest_gpu_that_fits(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lm.memory.devices, "DEVICES", ("h200", "l4"))
    target = tmp_path / "all.json"
    plan = ("plan", "--model", f"{FILE}:mlp", "--method", "default", "--device", "all")
    status, out, _ = run(*plan, "--batch", 8, "--json", target)
    assert status == 0
    found = [one["plan"] for one in json.loads(target.read_text())["devices"]]
    assert [one["device"] for one in found] == ["l4", "h200"]
    assert "the smallest GPU that fits: l4, " in out
    status, out, _ = run(*plan, "--batch", 8, "--budget", "1kB")
    assert status == 3 and "fits in none of these GPUs" in out
    status, _, err = run("plan", "--model", f"{FILE}:mlp", "--device", "all")
    assert status == 2 and "--device all takes one --method" in err


@gpu_compiler
def test_what_grew_between_two_plans(run, tmp_path):
    paths = tmp_path / "before.json", tmp_path / "after.json"
    plan = ("plan", "--model", f"{FILE}:mlp")
    assert run(*plan, "--batch", 4096, "--json", paths[0])[0] == 0
    assert run(*plan, "--batch", 8192, "--json", paths[1], "--method", "default")[0] == 0
    status, _, err = run("diff", *paths)
    assert status == 2 and "--method: expected one of default, lowmembp, got none" in err
    status, out, _ = run("diff", *paths, "--method", "default")
    assert status == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = {tuple(row[:-3]): row[-1] for row in rows if len(row) > 3}
    assert rows["batch",] == "+524,288 B" and rows["peak",].startswith("+")
    assert any("Dense" in key[-1] and key[0] == "intermediates" for key in rows)
    status, out, _ = run("diff", *reversed(paths), "--method", "default")
    assert f"-{rows['peak',][1:]}" in out
    status, _, err = run("diff", paths[1], __file__)
    assert status == 2 and "expected a file of `lowmembp plan --json`" in err


@gpu_compiler
def test_devices_and_parts_of_a_step(run, tmp_path):
    target = tmp_path / "plan.json"
    plan = ("plan", "--model", f"{FILE}:mlp", "--method", "default", "--batch", 256)
    run(*plan, "--devices", 8, "--json", target)
    shared = json.loads(target.read_text())["methods"][0]["plan"]
    run(*plan, "--json", target)
    alone = json.loads(target.read_text())["methods"][0]["plan"]
    assert shared["device_count"] == 8
    assert 8 * shared["parts"]["batch"] == alone["parts"]["batch"] > 0
    assert "the devices share the batch" in shared["notes"][0]
    assert run(*plan, "--parts", "batch")[0] == 2


@gpu_compiler
def test_budget(run):
    base = ("plan", "--model", f"{FILE}:mlp", "--batch", 8192)
    status, out, err = run(*base, "--budget", "25MB")
    assert status == 0
    assert err.count("planning") == 2  # the largest batch is not looked for
    assert "lowmembp is the fastest method that fits" in out and "with lm.patch():" in out
    assert out.count("does not fit") == 1

    status, out, err = run(*base, "--budget", "1kB", "--json", "-")
    assert status == 3
    assert "no method fits in 1,000 B: the smallest peak is" in err
    data = json.loads(out)
    assert data["fastest"] is None
    assert [one["plan"]["fits"] for one in data["methods"]] == [False, False]


@pytest.mark.slow
@gpu_compiler
def test_largest_batch(run, tmp_path):
    out_json = tmp_path / "plan.json"
    status, out, err = run(
        "plan", "--model", f"{FILE}:mlp", "--method", "default", "--batch", 8192, "--largest-batch",
        "--budget", "40MB", "--json", out_json,
    )  # fmt: skip
    assert status == 0
    assert err.count("planning") <= 8
    (one,) = json.loads(out_json.read_text())["methods"]
    largest = one["largest_batch"]
    assert largest % 8 == 0 and largest % 8192
    assert f"largest batch that fits: {largest:,}" in out
    assert one["largest_plan"]["peak"] <= 40_000_000
    workload = load_factory(f"{FILE}:mlp")("default", largest + 8)
    assert lm.memory.plan(workload.step, *workload.args).peak > 40_000_000


def test_fit(run, tmp_path):
    sample = tmp_path / "sample.npy"
    np.save(sample, np.random.default_rng(0).normal(size=10_000))
    plot, table = tmp_path / "fit.svg", tmp_path / "table.json"
    status, out, _ = run(
        "fit", "--function", "jax.nn.mish", "--bits", "4", "--weight", sample, "--keep-limits",
        "--plot", plot, "--json", table,
    )  # fmt: skip
    assert status == 0
    found = json.loads(table.read_text())
    assert len(found["thresholds"]) == 15 and found["levels"][0] == pytest.approx(0)
    assert eval(out[: out.index(")\n") + 1], {"lm": lm}).thresholds == pytest.approx(
        found["thresholds"], rel=1e-8
    )
    assert "relative error of the derivative" in out
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--function", "jax.nn.mash"], "--function: jax.nn.mash cannot be imported"),
        (["--function", "mish"], "--function: mish cannot be imported"),
        (["--function", "nowhere.py:f"], "there is no file nowhere.py"),
        (["--function", "jax.nn.softmax_"], "cannot be imported"),
        (["--function", "jax.numpy.concatenate"], "not a differentiable function of one number"),
        (["--function", "jax.nn.mish", "--weight", "wide"], "could not convert string"),
        (["--function", "jax.nn.mish", "--weight", "x.npy"], "No such file"),
        (["--function", "jax.nn.mish", "--weight", "1e300"], "weight: expected a number from"),
        (["--function", "jax.nn.mish", "--weight", "-1"], "weight: expected a number from"),
        (["--function", "jax.numpy.square", "--keep-limits"], "has limits at -inf"),
        (["--function", "jax.nn.mish", "--plot", "fit.doc"], "--plot must end in"),
    ],
)
def test_usage_errors_of_fit(run, arguments, message):
    status, out, err = run("fit", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("lowmembp: error: ") and message in err


@pytest.mark.parametrize("content", [b"PK\3\4", b"", b"\x93NUMPY\1\0", b"text"])
def test_a_weight_that_is_no_array(run, tmp_path, content):
    (tmp_path / "w.npy").write_bytes(content)
    status, out, err = run("fit", "--function", "jax.nn.mish", "--weight", tmp_path / "w.npy")
    assert (status, out) == (2, "") and err.startswith("lowmembp: error: --weight ")


PLANS = (
    "[" * 10**5,
    "[1]",
    "3",
    "{}",
    '{"methods": 3}',
    '{"methods": [{"method": [], "plan": 1}]}',
    "nested",
)


@pytest.mark.parametrize("content", PLANS)
def test_a_file_that_is_no_plan(run, tmp_path, content):
    if content == "nested":  # a plan, with a list in place of a number
        kernels = lm.memory.Cost((), ())
        plan = lm.memory.Plan(
            lm.memory.get_device("t4"), 1, 0.75, 0, 0, 0, 0, 0, 0, 0, 0, 0, live=(), cost=kernels
        )
        nested = "[" * 50 + "]" * 50
        content = plan.to_json().replace('"parameters": 0', f'"parameters": {nested}')
    (tmp_path / "plan.json").write_text(content)
    status, out, err = run("diff", tmp_path / "plan.json", tmp_path / "plan.json")
    assert (status, out) == (2, "") and "plan.json: expected a file of" in err


@pytest.mark.parametrize(
    "option",
    [
        *("rank=0", "rank=x", "accumulate=0", "tokens=-1", "tokens=1.5", "tokens=" + "9" * 5000),
        *("bits=3", "merged=x", "dtype=foo", "batch=3", "method=x", "layers=foo"),
    ],
)
def test_options_of_the_examples_are_checked(run, option):
    plan = ("plan", "--no-compile", "--model", "bert-base", "--options", option)
    status, out, err = run(*plan)
    assert (status, out) == (2, "") and option.partition("=")[0] in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit-b17"], "--model: expected one of vit-ti16, vit-b16"),
        (["--model", "nowhere.py:step"], "there is no file nowhere.py"),
        (["--model", f"{FILE}:gelu"], "has no function 'gelu'; it has mlp, loss_only, jitted"),
        (["--model", f"{FILE}:nothing"], "nothing must return a lm.memory.Workload or a pair"),
        (["--model", f"{FILE}:mlp", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["--model", f"{FILE}:mlp", "--method", "dots"], "it can have only default and lowmembp"),
        (["--model", f"{FILE}:mlp", "--method", "magic"], "got 'magic'"),
        (["--model", f"{FILE}:mlp", "--train", "full"], "takes no argument train; it takes batch"),
        (["--model", f"{FILE}:mlp", "--options", "width"], "--options: expected name=value"),
        (["--model", f"{FILE}:mlp", "--device", "a1"], "device: expected one of t4, l4"),
        (
            ["--model", f"{FILE}:mlp", "--link-bandwidth", "50"],
            "--link-bandwidth: '50' is not a size",
        ),
        (
            ["--model", f"{FILE}:mlp", "--devices", "9"],
            "--devices must be 1 to 8, or whole hosts of 8 up to 512, got 9",
        ),
        (["--model", f"{FILE}:mlp", "--budget", "24 apples"], "'24 apples' is not a size"),
        (["--model", f"{FILE}:mlp", "--budget", "9" * 400 + "GB"], "--budget: "),
        (["--model", f"{FILE}:mlp", "--budget", "24"], "with one of B, KB, KiB, MB, MiB, GB, GiB"),
        (["--model", f"{FILE}:fixed", "--largest-batch"], "--batch is needed"),
        (["--model", f"{FILE}:mlp", "--devices", "3"], "multiple of --devices 3, which share it"),
        (["--model", f"{FILE.parent}/no_python.txt:f"], "is not a Python file"),
        (["--model", f"{FILE}:keywords"], "keywords.<locals>.step(params, *, x)"),
        (["--model", f"{FILE}:mlp", "--plot", "/nowhere/plan.png"], "no folder /nowhere"),
        (["--model", f"{FILE}:mlp", "--plot", "plan.doc"], "--plot must end in"),
        (["--model", "vit-b16", "--train", "half"], "train: expected one of full"),
    ],
)
def test_usage_errors(run, arguments, message):
    status, out, err = run("plan", *arguments)
    assert status == 2
    assert err.startswith("lowmembp: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


OPTIONS = [
    *[("mlp", "width=abc"), ("mlp", "width=1.5"), ("mlp", "batch=3")],
    *[("typed", "rate=x"), ("typed", "biased=maybe")],
]


@pytest.mark.parametrize(("function", "option"), OPTIONS)
def test_options_have_the_type_of_the_default(run, function, option):
    status, out, err = run("plan", "--model", f"{FILE}:{function}", "--options", option)
    assert (status, out) == (2, "") and option.partition("=")[0] in err and err.count("\n") == 1


def test_options_become_numbers(run):
    factory = load_factory(f"{FILE}:typed")
    step, args = factory("default", None, rate="0.5", biased="false").step, ()
    assert step(*args) == (0.5, False)


@gpu_compiler
def test_several_methods(run):
    plan = ("plan", "--model", f"{FILE}:mlp", "--batch", 64, "--json", "-")
    status, out, _ = run(*plan, "--method", "lowmembp,default")
    assert status == 0
    assert [one["method"] for one in json.loads(out)["methods"]] == ["lowmembp", "default"]
    assert run(*plan, "--method", "lowmembp,default", "--device", "all")[0] == 2


@gpu_compiler
def test_the_fraction_of_the_memory(run):
    plan = ("plan", "--model", f"{FILE}:mlp", "--batch", 64, "--method", "default", "--json", "-")
    status, out, err = run(*plan, "--memory-fraction", 0.9)
    (one,) = json.loads(out)["methods"]
    assert status == 0 and one["plan"]["memory_fraction"] == 0.9
    status, out, err = run(*plan, "--memory-fraction", 1.5)
    assert status == 2 and "memory_fraction" in err


@gpu_compiler
def test_options_of_the_compiler(run):
    plan = ("plan", "--model", f"{FILE}:mlp", "--batch", 64, "--method", "default", "--no-cache")
    fused = "xla_disable_hlo_passes=priority-fusion"
    assert run(*plan, "--xla-flag", fused)[1] != run(*plan)[1]
    for flag in ("xla_nothing=1", "xla_gpu_enable_triton_gemm=maybe", "split"):
        status, out, err = run(*plan, "--xla-flag", flag)
        assert (status, out) == (2, "") and flag.partition("=")[0] in err.splitlines()[-1]


@pytest.mark.parametrize("function", ["exits", "no_results"])
def test_a_model_that_ends_or_returns_nothing(run, function):
    status, out, err = run("plan", "--model", f"{FILE}:{function}", "--method", "default")
    assert status in (1, 2) and out == "" and err.splitlines()[-1].startswith("lowmembp: error:")


def test_the_models_own_errors_are_shown_whole(run):
    with pytest.raises(RuntimeError, match="the model's own error"):
        run("plan", "--model", f"{FILE}:broken")


def test_missing_packages(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: (name != "rich" and find(name, *rest)) or None,
    )
    status, _, err = run("devices")
    assert status == 4
    assert "needs rich: pip install 'lowmembp_jax[planner]'" in err


def test_missing_compiler(run, monkeypatch):
    monkeypatch.setattr("lowmembp_jax.memory.devices.missing_wheels", lambda: ["jax-cuda12-pjrt"])
    lm.memory.topology.cache_clear()
    status, _, err = run("plan", "--model", f"{FILE}:mlp")
    assert status == 4
    assert "jax-cuda12-pjrt" in err


def test_a_file_that_is_no_python(run, tmp_path):
    (tmp_path / "model.py").write_text("import jax\ndef step(:\n")
    status, out, err = run("plan", "--model", f"{tmp_path / 'model.py'}:step")
    assert (status, out) == (2, "")
    assert f"model: {tmp_path / 'model.py'}, line 2: invalid syntax" in err
    assert err.count("\n") == 1
