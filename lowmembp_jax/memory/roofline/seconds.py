"""Estimates how long a kernel takes.

A kernel takes its start, plus the longest of three times: its bytes at the bandwidth, its
instructions at the rate of the vector units, and its FLOPs at the rate of the matrix units.

All constants here are fitted to 7,100 kernels of eight training steps on an H100 (a ViT, a BERT and
a LLaMA with JAX 0.11.2). The rates of other GPUs scale them, see `calibration.py`:

- `START_SECONDS` is what the smallest kernels of each kind take, `LAUNCH_SECONDS` the time between
  two kernels.
- `_INSTRUCTIONS` follows what XLA and CUDA expand an operation to. The exponential, the division
  and the conversions of float8 dominate them.
- `_REDUCED` (the instructions of each element that is reduced), `_ELEMENT` (a loop's index, load
  and store of each element) and `_SCATTERED` are fitted to reductions, to float8 casts and fills,
  and to scatters of word embeddings.
- `_CACHED` is the time of a byte in the L2 cache relative to one in memory.
- Attention is fitted to cuDNN's kernels for 128, 198 and 2,048 tokens with heads of 64. The
  factor for a bias is fitted to whole steps of a Swin on an H200. Its kernels are not measured.
- `_FEW_CHANNELS` is fitted to the convolution of the ViT's images and its gradient.
"""

import math
import re

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program, Shape
from lowmembp_jax.memory.roofline._traffic import fused_by, needed, updated

#: Seconds from the end of a kernel to the start of the next one on a CUDA stream.
LAUNCH_SECONDS = 0.6e-6
#: Seconds of a kernel of this kind with nothing to do.
START_SECONDS = {"matrix product": 4e-6, "column reduction": 2e-6, "loop": 1.5e-6}
_START = 1.4e-6

# The part of the vector units' published rate that kernels reach, counted in instructions.
_VECTOR = 0.94
# Instructions of operations that take more than one.
_INSTRUCTIONS = {
    "divide": 10, "exponential": 8, "exponential-minus-one": 12, "log": 12, "log-plus-one": 16,
    "tanh": 20, "logistic": 20, "erf": 24, "rsqrt": 6, "sqrt": 10, "cbrt": 20, "power": 40,
    "remainder": 20, "cosine": 30, "sine": 30, "tan": 40, "atan2": 40,
}  # fmt: skip
_NARROW = {"f32->bf16": 2, "->f8": 8, "f8->": 6}
_MOVES = {
    "bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice",
    "dynamic-update-slice", "gather", "get-tuple-element", "iota", "pad", "parameter", "reshape",
    "reverse", "scatter", "slice", "transpose", "tuple",
}  # fmt: skip
# XLA copies memory instead of launching a kernel for fusions of these alone.
_COPIES = {"dynamic-slice", "dynamic-update-slice"}
_MOVES_NOTHING = {"bitcast", "constant", "fusion", "fusion-start", "parameter", "tuple"}
_REDUCED = {"row reduction": 7, "column reduction": 14}
_ELEMENT = 37
_SCATTERED = 330
# The part of a loop's bandwidth that other kinds reach.
_BANDWIDTH = {"transpose": 0.62, "copy": 0.85}
_CACHED = 0.68
# Attention, forward and backward: the FLOPs that cuDNN's other work on a tile of queries is worth;
# the factor of them with a bias; the features of a head that a score's softmax is worth; the part
# of the published FLOP/s.
_ATTENTION = {False: (21e6, 2.0, 20, 0.7), True: (43e6, 4.0, 64, 0.9)}
_TILE = 128  # cuDNN computes whole tiles of queries and keys
# How often cuDNN's other kernels move the backward's workspace.
_WORKSPACE = 2.8
# The part of a product's rate that convolutions of fewer than 8 channels reach.
_FEW_CHANNELS = 0.065

#: What `vector_kind` returns, but "copy", which has no instructions.
VECTOR_KINDS = ("loop", "row reduction", "column reduction", "transpose", "scatter")


def vector_kind(instruction: Instruction) -> str:
    """Returns the kind of a kernel without matrix units."""
    inner = (instruction, *instruction.inner)
    opcodes = {each.opcode for each in inner if any(shape.size > 1 for shape in each.shapes)}
    if "scatter" in opcodes:
        return "scatter"
    if instruction.inner and opcodes & _COPIES and opcodes <= _COPIES | _MOVES_NOTHING:
        return "copy"
    columns = [_reduces_columns(each, inner) for each in inner if each.opcode == "reduce"]
    if columns:
        return "column reduction" if any(columns) else "row reduction"
    return "transpose" if "transpose" in opcodes else "loop"


def _reduces_columns(reduce: Instruction, inner: tuple[Instruction, ...]) -> bool:
    """Whether a reduction leaves the last axis, which is contiguous in memory."""
    reduced = {int(axis) for axis in reduce.attribute("dimensions").split(",") if axis}
    operand = next((one for one in inner if one.name == reduce.operands[0]), None)
    if operand is None or not operand.shapes:
        return False
    axes = [axis for axis, size in enumerate(operand.shapes[0].dims) if size > 1]
    return bool(axes) and axes[-1] not in reduced


def instructions(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Counts the instructions of a kernel without matrix units."""
    kind = vector_kind(instruction)
    if fused := fused_by(program, instruction):
        fractions = needed(program, fused)
        results = [fused.instructions[name] for name in updated(fused)]
    else:
        fused, fractions, results = computation, {instruction.name: 1.0}, [instruction]
    count = sum(
        fraction * _of(fused.instructions[name], fused, kind)
        for name, fraction in fractions.items()
        if fraction
    )
    if kind in _REDUCED:
        return count
    elements = max((shape.size for one in results for shape in one.shapes[:1]), default=0)
    return max(count, elements * (_SCATTERED if kind == "scatter" else _ELEMENT))


def _of(instruction: Instruction, computation: Computation, kind: str) -> float:
    opcode = instruction.opcode
    if opcode in _MOVES or not instruction.shapes:
        return 0.0
    size = instruction.shapes[0].size
    if opcode == "convert":
        source = computation.instructions[instruction.operands[0]].shapes[0].dtype
        change = f"{source}->{instruction.shapes[0].dtype}"
        return size * next((n for key, n in _NARROW.items() if key in change), 1)
    if opcode == "reduce":
        # Several results of one reduction are one pass.
        operand = computation.instructions[instruction.operands[0]].shapes[0]
        return operand.size * _REDUCED.get(kind, 1)
    return size * _INSTRUCTIONS.get(opcode, 1)


def vector_seconds(
    device: Device, kind: str, bytes_moved: float, cached: float, instructions: float
) -> float:
    """Estimates the seconds of a kernel without matrix units.

    Args:
      device: the GPU.
      kind: what `vector_kind` returns, or any other kind.
      bytes_moved: bytes read and written.
      cached: how many of them are read from the L2 cache.
      instructions: what `instructions` counts.
    """
    memory = (bytes_moved - (1 - _CACHED) * cached) / device.reached_bandwidth
    memory /= _BANDWIDTH.get(kind, 1.0)
    vector = instructions / (_VECTOR * device.vector_flops / 2)
    # Few warps of a column reduction run at a time, so loads and arithmetic overlap less.
    both = math.hypot(memory, vector) if kind == "column reduction" else max(memory, vector)
    return both + start_seconds(kind)


def start_seconds(kind: str) -> float:
    """Returns the seconds of a kernel of this kind with nothing to do."""
    return START_SECONDS.get(kind, _START)


def product_seconds(device: Device, flops: float, dtype: str) -> float:
    """Estimates the seconds of a matrix product on the matrix units."""
    return flops / device.product_rate(dtype) + START_SECONDS["matrix product"]


def convolution_seconds(
    device: Device, instruction: Instruction, shapes: tuple[Shape, ...], flops: float, dtype: str
) -> float:
    """Estimates the seconds of a convolution; `shapes` are its input, filter and result."""
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    sizes = (
        size
        for names, shape in zip(labels, shapes, strict=True)
        for name, size in zip(names, shape.dims, strict=True)
        if name in "bfio"
    )
    return product_seconds(device, flops / (_FEW_CHANNELS if min(sizes) < 8 else 1.0), dtype)


def attention_seconds(
    device: Device, instruction: Instruction, work: int, dtype: str, read: int, written: int
) -> float:
    """Estimates the seconds of cuDNN's flash attention, which does `work` FLOPs."""
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    scores = [int(size) for size in config["intermediate_tensor_shape"]["dimensions"]]
    tiles, key_tiles = (math.ceil(size / _TILE) for size in scores[2:])
    padded = tiles * key_tiles * _TILE**2 / math.prod(scores[2:])
    backward = "Backward" in instruction.attributes
    each, bias, softmax, fraction = _ATTENTION[backward]
    each *= bias if "Bias" in instruction.attribute("custom_call_target") else 1.0
    padded *= (1 + softmax / instruction.shapes[0].dims[-1]) / fraction
    rate = device.matrix_flops.get(dtype, device.vector_flops)
    moved = written
    if backward:
        moved = read + written + _WORKSPACE * attention_workspace(instruction)
    seconds = (padded * work + each * math.prod(scores[:2]) * tiles) / rate
    bandwidth = device.reached_bandwidth
    return max(seconds, (read + written) / bandwidth) + moved / bandwidth


def attention_workspace(instruction: Instruction) -> int:
    """Counts the bytes of scratch memory that cuDNN's backward takes.

    It accumulates the gradient of the queries in float32. If several heads share keys, it also
    holds the gradients of keys and values for each head.
    """
    if "Backward" not in instruction.attributes:
        return 0
    queries, keys, values = instruction.shapes[:3]
    batch, heads, tokens = queries.dims[:3]
    shared = heads // keys.dims[1]
    expanded = (keys.bytes + values.bytes) * shared if shared > 1 else 0
    return 4 * queries.size + 4 * batch * heads * tokens + expanded
