"""Reads JAX's names of operations: the transformations and the modules that they belong to.

In "jit(step)/transpose(jvp(ViT))/layer_0/dot_general", `jvp(...)` marks a function that is
differentiated, `transpose(...)` its backward, and "rematted_computation" what the backward of
`jax.checkpoint` computes again. The other parts are Flax modules and `jax.named_scope`s.
"""

import re

# Parts of a name that are not modules.
_NOT_MODULES = {
    "body", "checkpoint", "closed_call", "cond", "eval_jaxpr", "remat", "rematted_computation",
    "remat2", "scan", "shard_map", "while",
}  # fmt: skip


def is_backward(op_name: str) -> bool:
    """Whether an operation belongs to a backward pass, including what it recomputes."""
    return "transpose(" in op_name


def is_differentiated(op_name: str) -> bool:
    """Whether an operation belongs to a differentiated function or its backward pass."""
    return "jvp(" in op_name


def phase(op_name: str) -> str:
    """Returns "forward", "recomputation", "backward" or "other" (for example the optimizer)."""
    if "rematted_computation" in op_name:
        return "recomputation"
    if is_backward(op_name):
        return "backward"
    return "forward" if is_differentiated(op_name) else "other"


def module_path(op_name: str) -> str:
    """Returns the path of Flax modules in the name of an operation: "ViT/layer_0/query" or ""."""
    path: list[str] = []
    inside: list[str] = []
    for part in op_name.split("/")[1:-1]:
        name = re.sub(r"^((jvp|transpose|vmap)\()+|\)+$", "", part)
        if name != part:
            # The backward of a jax.checkpoint repeats the path: transpose(jvp(ViT))/jvp(ViT)/mlp.
            path, inside = _joined(path, inside), []
        # A number is the index of a block in a list of modules.
        if (name.isidentifier() or name.isdigit()) and name not in _NOT_MODULES:
            inside.append(name)
    return "/".join(_joined(path, inside))


def _joined(path: list[str], inside: list[str]) -> list[str]:
    return inside if inside[: len(path)] == path else path + inside


def layers_together(module: str) -> str:
    """Replaces the layers' numbers in a path of modules by stars, so that all layers are equal."""
    return re.sub(r"(?<=[_/])\d+(?=/|$)", "*", module)
