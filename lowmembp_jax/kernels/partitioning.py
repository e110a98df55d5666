"""Kernels under shardings: each device runs the kernel on its own shard, and nothing is gathered.

XLA cannot see into a kernel and would gather its sharded inputs. So the axes of a kernel's arrays
have names, one letter an axis as in an einsum, and each device runs the kernel on the shards that
the names allow. Under meshes with automatic axes this uses `custom_partitioning` (with a Shardy
rule), under meshes with explicit axes `shard_map`. Inside `shard_map` the kernel runs directly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from lowmembp_jax._jax_internals import check_vma, varying
from lowmembp_jax._tiling import array_mesh, resharded

Specs = tuple[P, ...]


def with_whole_rows(run: Callable[..., Array], *arrays: Array | None) -> Array:
    """Calls `run(*arrays)`; under an explicit mesh, gathers the last axis of the arrays first.

    The result is sharded as the first array, and gradients are sharded as the arguments. Under
    other meshes `Partitioned` does this.
    """

    def whole(a: Array | None) -> Array | None:
        if a is None or not any((spec := jax.typeof(a).sharding.spec)[-1:]):
            return a
        return resharded(a, P(*spec[:-1], None))

    if AxisType.Explicit not in array_mesh(*(a for a in arrays if a is not None)).axis_types:
        return run(*arrays)
    y, spec = run(*map(whole, arrays)), jax.typeof(arrays[0]).sharding.spec
    return resharded(y, spec) if any(spec[-1:]) else y


@dataclass(frozen=True)
class Partitioned:
    """A function of arrays whose axes have names.

    Attributes:
      local: the function, on whole arrays or on one device's shards.
      inputs: the names of each argument's axes, a letter an axis. Axes with one name are split the
        same way.
      outputs: the names of each result's axes. `local` sums over the axes that a result lacks; if
        such an axis is split, the results are then summed over the devices.
      whole: the names of axes that must not be split.
      reduced: the name of an axis over whose shards `local` reduces by itself, or "". `local` then
        has the argument `over`, the axes of the mesh that split this axis.
      done: the number of results, from the first on, that `local` has reduced over `reduced`.
      over: the value of `over` inside `shard_map`, where only the caller knows it.
    """

    local: Callable[..., Sequence[Array]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: str = ""
    reduced: str = ""
    done: int = 0
    over: tuple[str, ...] = ()

    def __call__(self, *args: Array) -> tuple[Array, ...]:
        mesh = array_mesh(*args)
        kinds = set(mesh.axis_types) if mesh.axis_names else set()
        # If only some axes are manual, XLA splits the work of `local`, unless `local` is a kernel.
        if kinds == {AxisType.Manual} or (self.reduced and AxisType.Manual in kinds):
            return self._manual(*args)
        run = custom_vmap(self._explicit if AxisType.Explicit in kinds else self._auto())
        run.def_vmap(self._batched)
        return tuple(run(*args))

    def _batched(self, axis_size: int, batched: Sequence[bool], *args: Array):
        every = (True,) * len(self.outputs)
        if axis_size == 0:  # no grid of a kernel is empty
            elements = (
                jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if b else a
                for a, b in zip(args, batched, strict=True)
            )
            one = jax.eval_shape(self._local(()), *elements)
            return tuple(jnp.zeros((0, *a.shape), a.dtype) for a in one), every
        new = next(letter for letter in "zyxwvuts" if letter not in "".join(self.inputs))
        mapped = replace(
            self,
            local=self._mapped(batched),
            inputs=tuple(new * b + axes for b, axes in zip(batched, self.inputs, strict=True)),
            outputs=tuple(new + axes for axes in self.outputs),
        )
        return mapped(*args), every

    def _mapped(self, batched: Sequence[bool]) -> Callable[..., Sequence[Array]]:
        def local(*args, **over):
            in_axes = [0 if b else None for b in batched]
            return jax.vmap(partial(self.local, **over), in_axes=in_axes)(*args)

        return local

    def _specs(self, given: Sequence[P]) -> tuple[Specs, Specs, Callable[..., Sequence[Array]]]:
        """The specs of arguments and results, and the function of one device with its sums."""
        split: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for axes, spec in zip(self.inputs, given, strict=True):
            for name, entry in zip(axes, spec, strict=False):
                mesh_axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                if name not in self.whole and name not in split and not used & set(mesh_axes):
                    split[name] = mesh_axes
                    used |= set(mesh_axes)

        def spec_of(axes: str) -> P:
            return P(*(split.get(name) or None for name in axes))

        def summed(place: int, axes: str) -> tuple[str, ...]:
            axes += self.reduced if place < self.done else ""
            return tuple(a for name in split if name not in axes for a in split[name])

        over = split.get(self.reduced, ())
        names = list(map(summed, range(len(self.outputs)), self.outputs))

        def local(*args):
            results = self._local(over)(*args)
            return tuple(lax.psum(r, n) if n else r for r, n in zip(results, names, strict=True))

        return tuple(map(spec_of, self.inputs)), tuple(map(spec_of, self.outputs)), local

    def _local(self, over: tuple[str, ...]) -> Callable[..., Sequence[Array]]:
        return partial(self.local, over=over) if self.reduced else self.local

    def _manual(self, *args: Array) -> tuple[Array, ...]:
        axes = varying(*args)
        if self.reduced or not axes:  # `local` tells JAX along which axes its results differ
            return tuple(self._local(self.over)(*args))
        # A kernel does not tell JAX along which axes its results differ, so check_vma=True would
        # refuse it. Its results differ along the axes of all arguments.
        with check_vma(False):
            results = self.local(*args)
        return tuple(lax.pcast(r, tuple(axes), to="varying") for r in results)

    def _explicit(self, *args: Array) -> tuple[Array, ...]:
        inputs, outputs, local = self._specs([jax.typeof(a).sharding.spec for a in args])
        mesh = array_mesh(*args)
        run = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return tuple(run(*map(resharded, args, inputs)))

    def _rule(self) -> str:
        """Writes the axes as a Shardy rule: `abm, ab -> m` becomes `a b m, a b -> m`."""
        return " -> ".join(", ".join(map(" ".join, side)) for side in (self.inputs, self.outputs))

    def _auto(self) -> Callable:
        def partition(mesh, arg_shapes, result_shapes):
            del result_shapes
            inputs, outputs, local = self._specs([a.sharding.spec for a in arg_shapes])
            sharding = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)  # noqa: E731
            return mesh, local, sharding(outputs), sharding(inputs)

        def infer(mesh, arg_shapes, result_shapes):
            del result_shapes
            outputs = self._specs([a.sharding.spec for a in arg_shapes])[1]
            return tuple(NamedSharding(mesh, spec) for spec in outputs)

        run = custom_partitioning(lambda *args: tuple(self._local(())(*args)))
        run.def_partition(
            partition,
            infer_sharding_from_operands=infer,
            sharding_rule=self._rule(),
            need_replication_factors=tuple(self.whole),
        )
        return run
