"""What part of its published rates a GPU reaches, against the measurements it comes from."""

from pathlib import Path

import pytest
from lowmembp_examples.benchmarks.product_rates import efficiencies, plugin, table

import lowmembp_jax as lm
from lowmembp_jax import cli
from lowmembp_jax.memory.calibration import _CURVES, SIZES, Calibration, Curve

# TransformerEngine's layer: tokens, and the products' terms and results, forward.
TOKENS, PRODUCTS = 15872, ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))


@pytest.mark.parametrize(
    ("seconds", "part"),
    [(1e-6, 0.1), (2e-6, 0.3), (4e-6, 0.7), (2**0.5 * 1e-6, 0.2), (1e-9, 0.1), (1.0, 0.7)],
)
def test_a_curve_is_read_between_powers_of_two(seconds, part):
    assert Curve(1e-6, (0.1, 0.3, 0.7)).part(seconds) == pytest.approx(part)


def test_a_product_takes_its_published_time_by_the_part():
    calibration = Calibration(
        {"bf16": Curve(1e-6, (0.1, 0.5)), "f32": Curve(1e-6, (0.2, 0.25))}, scale=0.8
    )
    assert calibration.product_seconds("bf16", 2e-6) == pytest.approx(2e-6 / (0.8 * 0.5))
    assert calibration.product_seconds("f32", 2e-6) == pytest.approx(2e-6 / (0.8 * 0.25))
    assert calibration.product_seconds("s8", 2e-6) == calibration.product_seconds("bf16", 2e-6)
    assert calibration.product_seconds("bf16", 0.0) == 0.0


def test_no_product_is_faster_than_published():
    calibration = Calibration({"bf16": Curve(1e-6, (0.9,))}, scale=1.5)
    assert calibration.product_seconds("bf16", 1e-6) == 1e-6


@pytest.mark.gpu_compiler
def test_the_curves_are_those_of_the_compiler_that_is_installed():
    found = efficiencies(table(plugin()))
    assert found.keys() == _CURVES.keys()
    for device, tables in found.items():
        assert tables.keys() == _CURVES[device].keys()
        for dtype, parts in tables.items():
            curve = _CURVES[device][dtype]
            assert curve.parts == parts
            rate = lm.memory.get_device(device).matrix_flops[dtype]
            assert 2 * 2 ** SIZES[0] / curve.first == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "milliseconds"),
    [("h200-nvl", (10.653, 10.813, 10.548)), ("b300", (4.196, 4.290, 4.272))],
)
def test_products_of_transformer_engine(device, milliseconds):
    gpu = lm.memory.get_device(device)
    seconds = sum(gpu.product_seconds(2 * TOKENS * k * n, "bf16") for k, n in PRODUCTS)
    # The forward product and both gradients have the same number of multiply-adds.
    for measured in milliseconds:
        assert seconds == pytest.approx(measured / 1e3, rel=0.1)


def test_an_h100_by_hand():
    h100 = lm.memory.get_device("h100")
    # XLA's median for 2^33 multiply-adds is 0.608 of 989.4 TFLOP/s, and products in a row reach
    # 600 of 835.5 on an H200 NVL, where XLA's largest reaches 0.7971 of the published rate.
    sustained = 2 * TOKENS * sum(k * n for k, n in PRODUCTS) / 10.653e-3 / 835.5e12 / 0.7971
    expected = 2**34 / (989.4e12 * 0.608 * sustained)
    assert h100.product_seconds(2**34, "bf16") == pytest.approx(expected, rel=1e-3)
    assert 2**34 / expected == pytest.approx(542e12, rel=0.01)
    assert h100.product_seconds(2**34, "f32") > 1.9 * expected
    assert h100.reached_bandwidth == pytest.approx(2.8e12, rel=0.01)


def test_a_slower_gpu_is_filled_by_smaller_products():
    l4, h100 = map(lm.memory.get_device, ("l4", "h100"))
    ratio = h100.matrix_flops["bf16"] / l4.matrix_flops["bf16"]
    flops = 2.0**33
    expected = h100.product_seconds(flops, "bf16") * h100.calibration.scale
    assert l4.product_seconds(flops / ratio, "bf16") == pytest.approx(expected)


def test_attention_is_slower_than_products_and_with_small_heads_slower_still():
    h100, flops = lm.memory.get_device("h100"), 2.0**42
    product = h100.product_seconds(flops, "bf16")
    large, small = (h100.attention_seconds(flops, "bf16", size) for size in (128, 64))
    assert product < large < small
    assert flops / large == pytest.approx(500e12, rel=0.01)
    # With few FLOPs it is as slow as a product.
    assert h100.attention_seconds(2e6, "bf16", 128) == h100.product_seconds(2e6, "bf16")


def test_each_device_says_what_it_was_calibrated_with(tmp_path):
    said = {name: str(lm.memory.get_device(name).calibration) for name in lm.memory.DEVICES}
    assert {name for name, text in said.items() if text.startswith("uncalibrated")} == {
        "t4",
        "rtx6000pro",
    }
    assert "XLA" in said["h100"] and "gpu-benches" in said["h100"]
    assert "products: uncalibrated; bandwidth: gpu-benches" in said["l4"]
    own = tmp_path / "own.txtpb"
    own.write_text((lm.memory.devices._TARGETS / "h100.txtpb").read_text())
    assert str(lm.memory.get_device(own).calibration).startswith("uncalibrated")


@pytest.mark.gpu_compiler
def test_a_report_says_it_once(capsys, jax_defaults):
    file = Path(__file__).parent / "data" / "planned_model.py"
    command = ["plan", "--model", f"{file}:mlp", "--device", "l4", "--no-cache"]
    assert cli.main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("Rates of l4: products: uncalibrated; bandwidth: gpu-benches") == 1
