"""Finds the fraction of a GPU's published rate that products reach, by size, as XLA measured it.

    python examples/benchmarks/product_rates.py

prints the tables of `lowmembp_jax/memory/calibration.py`. XLA's GPU compiler contains a table of
measured products (`matmul_interpolator_data.h`, later `default_matmul_perf_table.txtpb` in
openxla/xla, Apache-2.0): 375 shapes for an H100 and a B200, each axis 256 to 4,096, 1, 2 or 4
products at once. This script finds the table in the installed plugin and takes the median for each
power of two of multiply-adds.
"""

import math
import mmap
import re
import statistics
from collections import defaultdict
from pathlib import Path

import lowmembp_jax as lm
from lowmembp_jax.memory.calibration import SIZES

#: XLA's name of a GPU, and its name in `lm.memory.DEVICES`.
_GPUS = {"sm_90": "h100", "sm_100_B200": "b200"}
#: XLA's name of a product, and the dtype of the factors.
_DTYPES = {"bf16xbf16->bf16": "bf16", "f32xf32->f32": "f32", "f8e4m3fnxf8e4m3fn->bf16": "f8e4m3fn"}
_ENTRY = re.compile(
    r"b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)((?:\s+flops \{ key: \"[^\"]+\" value: \d+ \})+)"
)


def plugin() -> Path:
    """Returns the file of XLA's GPU compiler.

    Raises:
      FileNotFoundError: the compiler is not installed.
    """
    import jax_plugins

    for folder in jax_plugins.__path__:
        for found in sorted(Path(folder).glob("xla_cuda*/xla_cuda_plugin.so")):
            return found
    raise FileNotFoundError("no XLA GPU compiler: pip install 'lowmembp_jax[planner]' (Linux)")


def table(path: Path) -> str:
    """Returns XLA's table of measured products, as text.

    Raises:
      ValueError: the file has no table.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(b'key: "bf16xbf16->bf16"')
        if place < 0:
            raise ValueError(f"{path} has no table of measured products")
        return data[data.rfind(b"\0", 0, place) + 1 : data.find(b"\0", place)].decode()


def efficiencies(text: str) -> dict[str, dict[str, tuple[float, ...]]]:
    """Returns medians by GPU, dtype and size (`SIZES`), as fractions of the published rate.

    A dtype that exceeds the published rate is left out, because its measurement must be wrong.
    """
    found = {}
    parts = re.split(r'key: "(\w+)"\s*value \{', text)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name not in _GPUS:
            continue
        rates = lm.memory.get_device(_GPUS[name]).matrix_flops
        by_size: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for *sizes, flops in _ENTRY.findall(body):
            size = round(math.log2(math.prod(map(int, sizes))))
            for key, measured in re.findall(r'key: "([^"]+)" value: (\d+)', flops):
                if dtype := _DTYPES.get(key):
                    by_size[dtype][size].append(int(measured) / rates[dtype])
        found[_GPUS[name]] = {
            dtype: tuple(round(statistics.median(sizes[size]), 4) for size in SIZES)
            for dtype, sizes in by_size.items()
            if max(map(max, sizes.values())) <= 1
        }
    return found


def main() -> None:
    for name, tables in efficiencies(table(plugin())).items():
        for dtype, values in tables.items():
            print(f'"{name}", "{dtype}": {values}')


if __name__ == "__main__":
    main()
