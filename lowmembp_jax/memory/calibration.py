"""The fraction of its published rates that a GPU reaches, from measurements.

**Products.** The fraction is what the largest of XLA's own measured products reach (openxla/xla,
`xla/service/gpu/model/matmul_interpolator_data.h`, Apache-2.0), except where a measurement of
products in a row exists, because a GPU lowers its clock between them:

- H100 and H200: the products of training steps of a ViT, a BERT and a LLaMA on an H100.
- H200 NVL and B300: TransformerEngine's forward products of a layer (docs/examples/gemm_profiling
  of NVIDIA/TransformerEngine).
- A100: mamf-finder (271.2 of 312 TFLOP/s, stas00/ml-engineering).
- A6000 (95 of 154.8) and RTX 4090 (161 of 165.2): qhduan/transformers-benchmarks.

**Bandwidth** of the H100 is what its loops reach in the same steps (3.0 of 3.35 TB/s). The H200's
is what loops reach in a LLaMA's step on an H200. The others are measured with a kernel that writes
as much as it reads ("scale" of te42kyfo/gpu-benches).

`roofline/seconds.py` has the constants that all GPUs share.
"""

import dataclasses
from collections.abc import Mapping

#: The source if nobody has published a measurement.
UNCALIBRATED = "uncalibrated"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The fraction of its published rates that a GPU reaches.

    Attributes:
      products: the fractions of large products, by HLO dtype of the factors. Other dtypes use
        "bf16".
      bandwidth: the fraction of the published bandwidth.
      products_source: who measured the products.
      bandwidth_source: who measured the bandwidth.
      error: the largest relative error of the estimated time of a measured step, or None.
    """

    products: Mapping[str, float]
    bandwidth: float = 1732 / 2039
    products_source: str = UNCALIBRATED
    bandwidth_source: str = UNCALIBRATED
    error: float | None = None

    def __str__(self) -> str:
        if self.products_source == self.bandwidth_source == UNCALIBRATED:
            return f"{UNCALIBRATED}: uses an H100's products and an A100's bandwidth"
        said = f"products: {self.products_source}; bandwidth: {self.bandwidth_source}"
        return said if self.error is None else f"{said}; measured steps: within {self.error:.0%}"


# TransformerEngine's four forward products of a layer: 15,872 tokens, hidden 4,096, FFN 16,384.
_TE_TFLOP = 2 * 15872 * 4096 * (12288 + 4096 + 16384 + 16384) / 1e12
_STREAM = "gpu-benches"
_PROFILES = "profiles of training steps"
_H100 = {"bf16": 0.79, "f32": 0.68}
_A100 = {
    "products": {"bf16": 271.2 / 312},
    "products_source": "ml-engineering",
    "bandwidth_source": _STREAM,
}
_H200 = {
    "products": _H100,
    "products_source": _PROFILES,
    "bandwidth": 0.78,
    "bandwidth_source": _PROFILES,
    "error": 0.07,
}
_TE = "TransformerEngine"
_ADA = {"bandwidth": 775 / 864, "bandwidth_source": f"{_STREAM}, an L40"}
_CALIBRATIONS: dict[str, dict] = {
    "a100-40gb": {**_A100, "bandwidth": 1381 / 1555},
    "a100-80gb": {**_A100, "bandwidth": 1732 / 2039},
    "h100": {**_H200, "bandwidth": 0.895, "error": 0.04},
    "h200": _H200,
    "h200-nvl": {
        **_H200,
        "products": {"bf16": _TE_TFLOP / 10.653e-3 / 835.5},
        "products_source": _TE,
        "error": None,
    },
    "b200": {
        "products": {"bf16": 0.74, "f32": 0.77, "f8e4m3fn": 0.73, "f8e5m2": 0.73},
        "products_source": "XLA",
    },
    "b300": {"products": {"bf16": _TE_TFLOP / 4.196e-3 / 2375.5}, "products_source": _TE},
    "a6000": {"products": {"bf16": 95 / 154.8}, "products_source": "transformers-benchmarks"},
    "rtx4090": {
        **_ADA,
        "products": {"bf16": 161 / 165.2},
        "products_source": "transformers-benchmarks",
    },
    "l4": _ADA,
}


def calibration(device: str) -> Calibration:
    """Returns the calibration of one of `lm.memory.DEVICES`. Other devices are uncalibrated."""
    return Calibration(**{"products": _H100, **_CALIBRATIONS.get(device, {})})
