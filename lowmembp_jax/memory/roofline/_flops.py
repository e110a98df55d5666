"""Counts the FLOPs of matrix products, convolutions and attention in a compiled program.

A multiply-add counts as two FLOPs, or as eight for complex numbers. Elementwise operations and
reductions count as zero, because memory limits their kernels. Sorts, solvers, and Pallas and Triton
kernels also count as zero, because the program does not show what is inside them.
"""

import math
import re

from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program, Shape


def flops(program: Program, computation: Computation, instruction: Instruction) -> tuple[int, str]:
    """Counts the FLOPs that an instruction runs on the matrix units.

    Returns:
      The FLOPs and the HLO dtype of the factors, or (0, "") without FLOPs. The dtype is
      "f32 highest" for float32 products at the highest precision, which XLA does not compute in
      TF32.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion":
        fused = program.computations[instruction.calls[0]]
        parts = [flops(program, fused, inner) for inner in fused.instructions.values()]
        return sum(part for part, _ in parts), max(parts, default=(0, ""))[1]
    operands = [computation.instructions[name].shapes[0] for name in instruction.operands]
    target = instruction.attribute("custom_call_target")
    if opcode in ("dot", "scaled-dot"):
        numbers = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
        count = _product(instruction.shapes[0], operands[0], tuple(map(int, numbers)))
    elif target.startswith("__cublas") and target != "__cublas$triangularSolve":
        config = instruction.backend_config.get("gemm_backend_config", {})
        numbers = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
        count = _product(instruction.shapes[0], operands[0], tuple(map(int, numbers)))
    elif target.startswith("__cudnn$fmha"):
        count = _attention(instruction, operands)
    elif opcode == "convolution" or target.startswith("__cudnn$conv"):
        count = _convolution(instruction, operands, target)
    else:
        return 0, ""
    dtype = operands[0].dtype
    if dtype in ("c64", "c128"):
        count *= 4
    return count, _type(instruction, dtype)


def _product(result: Shape, lhs: Shape, contracting: tuple[int, ...]) -> int:
    return 2 * result.size * math.prod(lhs.dims[axis] for axis in contracting)


def _attention(instruction: Instruction, operands: list[Shape]) -> int:
    """Counts 2 products for the forward (scores, values) and 5 for the backward.

    One of the 5 recomputes the scores. A causal mask halves the count, as in FlashAttention (Dao et
    al. 2022), because cuDNN skips masked blocks. A sliding window of w keys out of T leaves
    w T - w^2 / 2 of the T^2 scores.
    """
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    # [batch, heads, queries, keys]
    scores = [int(size) for size in config["intermediate_tensor_shape"]["dimensions"]]
    query, value = operands[0].dims[-1], operands[2].dims[-1]
    window = int(config.get("sliding_window_length", 0))
    fraction = 1.0
    if "CAUSAL" in config.get("mask_type", "") or window:
        kept = min(window or scores[-1], scores[-1]) / scores[-1]
        fraction = kept * (1 - kept / 2)
    products = 3 * query + 2 * value if "Backward" in instruction.attributes else query + value
    return round(2 * math.prod(scores) * products * fraction)


def _convolution(instruction: Instruction, operands: list[Shape], target: str) -> int:
    """Counts, for each output position and feature, the product with the feature's filter."""
    labels = instruction.attribute("dim_labels")  # input_filter->output, such as b01f_01io->b01f
    output, filters = instruction.shapes[0], operands[1]
    if target.endswith("convBackwardInput"):
        output = operands[0]
    elif target.endswith("convBackwardFilter"):
        output, filters = operands[1], output
    features = output.dims[labels.partition("->")[2].index("f")]
    return 2 * output.size * filters.size // features


def _type(instruction: Instruction, dtype: str) -> str:
    config = instruction.backend_config.get("gemm_backend_config", {}).get("precision_config", {})
    precision = instruction.attribute("operand_precision")
    precisions = precision.split(",") if precision else config.get("operand_precision", [])
    exact = any(one.strip().lower() == "highest" for one in precisions)
    return f"{dtype} highest" if dtype == "f32" and exact else dtype
