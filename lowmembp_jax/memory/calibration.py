"""The fraction of its published rates that a GPU reaches, from published measurements.

**Products.** `_CURVES` holds medians of XLA's own table of measured products, with 375 shapes for
each GPU (openxla/xla, `xla/service/gpu/model/matmul_interpolator_data.h`, Apache-2.0). They are
grouped by the power of two of their multiply-adds. The curve of 8-bit floats on an H100 is missing,
because XLA's numbers exceed the published rate.

XLA times one product at a time. In a training step, one large product follows another and the clock
falls. TransformerEngine's forward products of a layer reach 0.90 of XLA's H100 rate on an H200 NVL
and 0.86 of XLA's B200 rate on a B300 (docs/examples/gemm_profiling of NVIDIA/TransformerEngine).
The curves are scaled by these factors.

The A100's large products come from mamf-finder (271.2 of 312 TFLOP/s, stas00/ml-engineering). The
A6000's (95 of 154.8) and the RTX 4090's (161 of 165.2) come from qhduan/transformers-benchmarks.

A curve is a function of a product's time at the published rate and not of its size, because a GPU
with a sixth of the rate is as busy with a sixth of the multiply-adds. Therefore a curve also serves
other dtypes and other GPUs. If only large products were measured on a GPU, the curve is scaled to
them.

**Bandwidth** is measured with a kernel that writes as much as it reads ("scale" of
te42kyfo/gpu-benches). Its H200 numbers are not used: they still rise at full occupancy, so the
kernel's loads do not fill the memory bandwidth.

**Attention** uses cuDNN's rates on an H100 with 4,096 tokens. With heads of 128 they are
518 TFLOP/s forward with a causal mask and 499 backward. With heads of 64 they are 408 forward and
417 backward (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, figures 5 and 6).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

#: The powers of two of the multiply-adds in XLA's table.
SIZES = range(24, 39)

#: The source if nobody has published a measurement.
UNCALIBRATED = "uncalibrated"


class Curve(NamedTuple):
    """The fractions of the published rate that products reach, each twice as long as the last."""

    first: float  # seconds that the smallest product takes at the published rate
    parts: tuple[float, ...]  # the fraction for each product

    def part(self, seconds: float) -> float:
        """Interpolates the fraction for a product that takes `seconds` at the published rate."""
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
    """The fraction of its published rates that a GPU reaches.

    Attributes:
      curves: the curves of products, by HLO dtype of the factors. Other dtypes use "bf16".
      scale: a factor for all curves.
      bandwidth: the fraction of the published bandwidth.
      products_source: who measured the products.
      bandwidth_source: who measured the bandwidth.
    """

    curves: Mapping[str, Curve]
    scale: float = 1.0
    bandwidth: float = 1732 / 2039
    products_source: str = UNCALIBRATED
    bandwidth_source: str = UNCALIBRATED

    def product_seconds(self, dtype: str, seconds: float) -> float:
        """Estimates the seconds of a product that takes `seconds` at the published rate."""
        curve = self.curves.get(dtype) or self.curves["bf16"]
        return seconds / min(1.0, self.scale * curve.part(seconds)) if seconds else 0.0

    def attention_seconds(self, dtype: str, seconds: float, head_size: int) -> float:
        """Estimates the same for flash attention with heads of `head_size`."""
        reached = (500 if head_size >= 128 else 410) / 989.4
        return max(self.product_seconds(dtype, seconds), seconds / reached)

    def __str__(self) -> str:
        if self.products_source == self.bandwidth_source == UNCALIBRATED:
            return f"{UNCALIBRATED}: uses an H100's products and an A100's bandwidth"
        return f"products: {self.products_source}; bandwidth: {self.bandwidth_source}"


def _scale(curve: str, measured: float, published: float) -> float:
    """Returns the factor that scales the end of a curve to the measured TFLOP/s."""
    return measured / published / _CURVES[curve]["bf16"].parts[-1]


# TransformerEngine's four forward products of a layer: 15,872 tokens, hidden 4,096, FFN 16,384.
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
    """Returns the calibration of one of `lm.memory.DEVICES`. Other devices are uncalibrated."""
    return Calibration(**_CALIBRATIONS.get(device, {"curves": _CURVES["h100"]}))
