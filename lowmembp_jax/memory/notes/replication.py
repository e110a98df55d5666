"""Shards the batch by default, and notes the arguments that every device holds whole."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lowmembp_jax.memory.classification.arguments import Argument
from lowmembp_jax.memory.lowering.meshes import is_on_host
from lowmembp_jax.memory.sizes import array_bytes, format_bytes

# The note leaves out parts whose whole arrays are below this fraction of all arguments.
_TOLD = 1e-3


def batch_shardings(args: tuple[Any, ...], named: Sequence[Argument]) -> Any:
    """Shards a batch along the mesh's first axis.

    The batch size is the first axis of the batch's largest array.

    Args:
      args: abstract arguments, sharded over a mesh.
      named: the arrays in `args`.

    Returns:
      A `PartitionSpec` or None for each array. None instead of the tree if there is one device, or
      if the devices cannot share the batch evenly.
    """
    leaves, tree = jax.tree.flatten(args)
    if not leaves:
        return None
    mesh = leaves[0].sharding.mesh
    batch = [one.shape for one in named if one.part == "batch" and one.shape]
    size = max(batch, key=math.prod, default=(1,))[0]
    if mesh.size == 1 or size % mesh.axis_sizes[0]:
        return None
    spec = PartitionSpec(mesh.axis_names[0])
    specs = [spec if one.part == "batch" and one.shape[:1] == (size,) else None for one in named]
    return jax.tree.unflatten(tree, specs) if any(specs) else None


def replicated(args: tuple[Any, ...], named: Sequence[Argument]) -> tuple[str, ...]:
    """Returns a note of the whole arrays that each of several devices holds, if there are any."""
    leaves = jax.tree.leaves(args)
    if not leaves or leaves[0].sharding.mesh.size == 1:
        return ()
    whole: Counter[str] = Counter()
    total = 0
    for leaf, one in zip(leaves, named, strict=True):
        size = array_bytes(leaf.shape, leaf.dtype)
        total += size
        is_whole = leaf.sharding.is_fully_replicated and not is_on_host(leaf.sharding)
        whole[one.part] += size if is_whole else 0
    told = [(part, size) for part, size in whole.items() if size > _TOLD * total]
    what = ", ".join(f"{part.replace('_', ' ')} {format_bytes(size)}" for part, size in told)
    count = leaves[0].sharding.mesh.size
    return (f"each of the {count} devices has whole arrays of: {what}",) if told else ()
