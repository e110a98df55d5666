"""What part of its published rates a GPU reaches, by measurements that others published.

**Products.** `_CURVES` has medians of XLA's own table of measured products, 375 shapes a GPU
(openxla/xla, `xla/service/gpu/model/matmul_interpolator_data.h`, Apache-2.0), by the power of two
of their multiply-adds. `python examples/benchmarks/product_rates.py` makes it from the plugin that
is installed. XLA's 8-bit floats of an H100 exceed its published rate and are left out.

XLA times one product at a time. With one large product after another, as in a training step, the
clock falls: TransformerEngine's forward products of a layer reach 0.90 of XLA's H100 on an H200 NVL
and 0.86 of XLA's B200 on a B300 (docs/examples/gemm_profiling of NVIDIA/TransformerEngine). The
curves are scaled by that.

An A100's large products are those of mamf-finder (271.2 of 312 TFLOP/s, stas00/ml-engineering), an
A6000's and an RTX 4090's those of qhduan/transformers-benchmarks (95 of 154.8, 161 of 165.2).

A curve is read by how long a product would take at the published rate, and not by its size: a GPU
with a sixth of the rate is as busy with a sixth of the multiply-adds. So it serves other dtypes and
other GPUs. Where somebody measured only large products on a GPU, the curve is scaled to them.

**Bandwidth** is that of a kernel that writes as much as it reads: "scale" of te42kyfo/gpu-benches.
Its H200 is not used. That kernel's loads do not fill it: the numbers still rise at full occupancy.

**Attention** is cuDNN's on an H100 with 4,096 tokens: with heads of 128, 518 TFLOP/s forward with a
causal mask and 499 backward; with heads of 64, 408 forward and 417 backward (FlashAttention-3, Shah
et al. 2024, arXiv:2407.08608, figures 5 and 6).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

#: Powers of two of the multiply-adds in XLA's table.
SIZES = range(24, 39)

#: Where nobody published a measurement.
UNCALIBRATED = "uncalibrated"


class Curve(NamedTuple):
    """The part of the published rate that products reach.

    Attributes:
      first: seconds that the smallest would take at the published rate. Each next takes twice as
        long.
      parts: of the published rate, one for each.
    """

    first: float
    parts: tuple[float, ...]

    def part(self, seconds: float) -> float:
        """The part for a product that would take so long at the published rate."""
        place = math.log2(seconds / self.first)
        return float(np.interp(place, range(len(self.parts)), self.parts))


def _curve(flops_per_second: float, *parts: float) -> Curve:
    return Curve(2 * 2 ** SIZES[0] / flops_per_second, parts)


# fmt: off
_CURVES: dict[str, dict[str, Curve]] = {
    "h100": {
        "bf16": _curve(989.4e12, 0.0068, 0.0125, 0.0238, 0.0443, 0.0825, 0.1443, 0.2337, 0.3496,
                       0.4787, 0.608, 0.7293, 0.7319, 0.779, 0.811, 0.7971),
        "f32": _curve(494.7e12, 0.0122, 0.0206, 0.035, 0.0666, 0.1066, 0.1652, 0.2286, 0.3126,
                      0.4232, 0.48, 0.5859, 0.6354, 0.6592, 0.6791, 0.6986),
    },
    "b200": {
        "bf16": _curve(2250e12, 0.003, 0.006, 0.0096, 0.0196, 0.0391, 0.0715, 0.1221, 0.2063,
                       0.3014, 0.4271, 0.5155, 0.5682, 0.6273, 0.6517, 0.7423),
        "f32": _curve(1125e12, 0.0045, 0.01, 0.0168, 0.0294, 0.0578, 0.1018, 0.1669, 0.2582,
                      0.3751, 0.4854, 0.5603, 0.6237, 0.6802, 0.7672, 0.773),
        "f8e4m3fn": _curve(4500e12, 0.0015, 0.0029, 0.0053, 0.0104, 0.02, 0.0368, 0.0679, 0.1134,
                           0.2024, 0.3151, 0.4185, 0.5369, 0.619, 0.6949, 0.7287),
    },
}
# fmt: on


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What part of its published rates a GPU reaches.

    Attributes:
      curves: for products, by HLO dtype of the factors. Other dtypes take that of "bf16".
      scale: of the curves.
      bandwidth: the part of the published bandwidth.
      products_source: who measured products.
      bandwidth_source: who measured the bandwidth.
    """

    curves: Mapping[str, Curve]
    scale: float = 1.0
    bandwidth: float = 1732 / 2039
    products_source: str = UNCALIBRATED
    bandwidth_source: str = UNCALIBRATED

    def product_seconds(self, dtype: str, seconds: float) -> float:
        """Seconds of a product of this dtype that would take `seconds` at the published rate."""
        curve = self.curves.get(dtype) or self.curves["bf16"]
        return seconds / min(1.0, self.scale * curve.part(seconds)) if seconds else 0.0

    def attention_seconds(self, dtype: str, seconds: float, head_size: int) -> float:
        """Likewise of flash attention with heads of this size."""
        reached = (500 if head_size >= 128 else 410) / 989.4
        return max(self.product_seconds(dtype, seconds), seconds / reached)

    def __str__(self) -> str:
        if self.products_source == self.bandwidth_source == UNCALIBRATED:
            return f"{UNCALIBRATED}: as an H100's products and an A100's bandwidth"
        return f"products: {self.products_source}; bandwidth: {self.bandwidth_source}"


def _scale(curve: str, measured: float, published: float) -> float:
    """What takes the end of a curve to the TFLOP/s that large products reached."""
    return measured / published / _CURVES[curve]["bf16"].parts[-1]


# TransformerEngine's four products of a layer, forward: 15,872 tokens, hidden 4,096, FFN 16,384.
_TE_TFLOP = 2 * 15872 * 4096 * (12288 + 4096 + 16384 + 16384) / 1e12
_H200_NVL = _scale("h100", _TE_TFLOP / 10.653e-3, 835.5)
_B300 = _scale("b200", _TE_TFLOP / 4.196e-3, 2375.5)

_XLA = "XLA, TransformerEngine"
_TE = "TransformerEngine"
_MAMF = "ml-engineering"
_MICRO = "transformers-benchmarks"
_STREAM = "gpu-benches"
_HOPPER = {
    "curves": _CURVES["h100"],
    "scale": _H200_NVL,
    "products_source": _XLA,
    "bandwidth": 1704 / 2039,
    "bandwidth_source": f"{_STREAM}, an H100 PCIe",
}
_BLACKWELL = {"curves": _CURVES["b200"], "scale": _B300, "products_source": _XLA}
_ADA = {
    "curves": _CURVES["h100"],
    "bandwidth": 775 / 864,
    "bandwidth_source": f"{_STREAM}, an L40",
}
_AMPERE = {"curves": _CURVES["h100"]}
_A100 = {
    **_AMPERE,
    "scale": _scale("h100", 271.2, 312.0),
    "products_source": _MAMF,
    "bandwidth_source": _STREAM,
}
_CALIBRATIONS: dict[str, dict] = {
    "a100-40gb": {**_A100, "bandwidth": 1381 / 1555},
    "a100-80gb": {**_A100, "bandwidth": 1732 / 2039},
    "h100": _HOPPER,
    "h200": _HOPPER,
    "h200-nvl": {**_HOPPER, "products_source": _TE},
    "b200": _BLACKWELL,
    "b300": {**_BLACKWELL, "products_source": _TE},
    "a6000": {**_AMPERE, "scale": _scale("h100", 95, 154.8), "products_source": _MICRO},
    "rtx4090": {**_ADA, "scale": _scale("h100", 161, 165.2), "products_source": _MICRO},
    "l4": _ADA,
}


def calibration(device: str) -> Calibration:
    """The calibration of one of `lm.memory.DEVICES`; others are uncalibrated."""
    return Calibration(**_CALIBRATIONS.get(device, {"curves": _CURVES["h100"]}))
