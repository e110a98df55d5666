"""Kernels under shardings: each device runs the kernel on its own shard, and nothing is gathered.

XLA cannot see into a kernel and would gather its sharded inputs. So the axes of a kernel's arrays
have names, one letter an axis as in an einsum, and each device runs the kernel on the shards that
the names allow. Under meshes with automatic axes this uses `custom_partitioning` (with a Shardy
rule), under meshes with explicit axes `shard_map`. Inside `shard_map` the kernel runs directly.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from lowmembp_jax._jax_internals import check_vma, varying
from lowmembp_jax._tiling import array_mesh, resharded

Specs = tuple[P, ...]
Axes = tuple[str, ...]


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


#: The identity, whose lowering for `jax.export` with several devices is an error.
_not_exported_p = Primitive("lowmembp_not_exported")
_not_exported_p.def_impl(lambda x: x)
_not_exported_p.def_abstract_eval(lambda x: x)


def _lower_not_exported(ctx, x):
    context = ctx.module_context
    devices = getattr(context.axis_context, "num_devices", 1)
    if context.lowering_parameters.for_export and devices > 1:
        raise NotImplementedError(
            f"jax.export: losses and kernels of lowmembp_jax: expected explicit axes of the mesh, "
            f"or `jax.shard_map` around them, got automatic axes of {devices} devices, for which "
            f"JAX cannot export `custom_partitioning`"
        )
    return [x]


mlir.register_lowering(_not_exported_p, _lower_not_exported)


@dataclass(frozen=True)
class Partitioned:
    """A function of arrays whose axes have names.

    XLA pads the last shards of an axis that its devices do not divide. What stands there is
    arbitrary, also NaN. This class writes `neutral` there if a result lacks the axis, so that
    `local` sums over real elements and neutral ones. Results that have the axis are cut by XLA.

    Attributes:
      local: the function, on whole arrays or on one device's shards.
      inputs: the names of each argument's axes, a letter an axis. Axes with one name are split the
        same way.
      outputs: the names of each result's axes. `local` sums over the axes that a result lacks; if
        such an axis is split, the results are then summed over the devices.
      neutral: for each argument the number that changes no sum, or None if `local` itself ignores
        what is padded.
      whole: the names of axes that must not be split.
      reduced: the name of an axis over whose shards `local` reduces by itself, or "". `local` then
        has the arguments `over`, the axes of the mesh that split this axis, and `length`, the
        number of its elements on all devices. It must not count padded elements.
      done: the number of results, from the first on, that `local` has reduced over `reduced`.
      over: the value of `over` inside `shard_map`, where only the caller knows it.
    """

    local: Callable[..., Sequence[Array]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    neutral: tuple[float | None, ...]
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
            elements = [
                jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if b else a
                for a, b in zip(args, batched, strict=True)
            ]
            one = jax.eval_shape(self._local((), self._lengths(elements)), *elements)
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

    def _specs(
        self, mesh: Any, args: Sequence[Any], given: Sequence[P], results: Sequence[Any] = ()
    ) -> tuple[Specs, Specs, Callable[..., Sequence[Array]]]:
        """The specs of arguments and results, and the function of one device with its sums.

        Args:
          results: the types of the results, if they are known.
        """
        split, lengths = self._split(mesh, (*args, *results), given), self._lengths(args)
        parts = {name: math.prod(mesh.shape[a] for a in split[name]) for name in lengths}
        padded = [name for name, length in lengths.items() if length % parts[name]]
        summed = {name for name in padded if any(name not in axes for axes in self.outputs)}

        def spec_of(axes: str) -> P:
            return P(*(split.get(name) or None for name in axes))

        over = split.get(self.reduced, ())

        def summed_over_devices(place: int, result: Array) -> Array:
            axes = self.outputs[place] + (self.reduced if place < self.done else "")
            of_mesh = tuple(a for name in split if name not in axes for a in split[name])
            return lax.psum(result, of_mesh) if of_mesh else result

        def filled(x: Array, axes: str, neutral: float | None) -> Array:
            if neutral is None:
                return x
            for name in summed.intersection(axes):
                first = lax.axis_index(split[name]) * x.shape[axes.index(name)]
                place = first + lax.broadcasted_iota(jnp.int32, x.shape, axes.index(name))
                x = jnp.where(place < lengths[name], x, jnp.asarray(neutral, x.dtype))
            return x

        def local(*args):
            results = self._local(over, lengths)(*map(filled, args, self.inputs, self.neutral))
            return tuple(itertools.starmap(summed_over_devices, enumerate(results)))

        return tuple(map(spec_of, self.inputs)), tuple(map(spec_of, self.outputs)), local

    def _split(self, mesh: Any, arrays: Sequence[Any], given: Sequence[P]) -> dict[str, Axes]:
        """The axes of the mesh that split each axis.

        If two axes want one axis of the mesh, the one gets it with which `arrays`, the arguments
        and the known results, take the fewest bytes on a device.
        """
        wanted: dict[str, Axes] = {}
        for axes, spec in zip(self.inputs, given, strict=True):
            for name, entry in zip(axes, (*spec, *[None] * len(axes)), strict=False):
                of_mesh = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                wanted.setdefault(name, () if name in self.whole else of_mesh)
        owners = {axis: [n for n in wanted if axis in wanted[n]] for axis in mesh.axis_names}
        owners = {axis: names for axis, names in owners.items() if names}

        def kept(name: str, owner: dict[str, str]) -> Axes:
            # Without an outer axis of the mesh, the shards would have to move between devices.
            return tuple(itertools.takewhile(lambda axis: owner[axis] == name, wanted[name]))

        every = (
            dict(zip(owners, names, strict=True)) for names in itertools.product(*owners.values())
        )
        choices = [{name: kept(name, owner) for name in wanted} for owner in every]

        def held(split: dict[str, Axes]) -> float:
            parts = {name: math.prod(mesh.shape[a] for a in split[name]) for name in split}
            of = zip((*self.inputs, *self.outputs), arrays, strict=False)
            sizes = ((names, x.size * x.dtype.itemsize) for names, x in of)
            return sum(size / math.prod(parts[name] for name in names) for names, size in sizes)

        return min(choices, key=held)

    def _lengths(self, args: Sequence[Any]) -> dict[str, int]:
        """The lengths of the axes by name."""
        pairs = zip(self.inputs, args, strict=True)
        return {name: size for axes, x in pairs for name, size in zip(axes, x.shape, strict=True)}

    def _local(self, over: tuple[str, ...], lengths: dict[str, int]) -> Callable:
        if not self.reduced:
            return self.local
        return partial(self.local, over=over, length=lengths[self.reduced])

    def _manual(self, *args: Array) -> tuple[Array, ...]:
        axes = varying(*args)
        if self.reduced or not axes:  # `local` tells JAX along which axes its results differ
            lengths = self._lengths(args)
            if self.reduced:  # shards inside `shard_map` are equal
                lengths[self.reduced] *= math.prod(map(lax.axis_size, self.over))
            return tuple(self._local(self.over, lengths)(*args))
        # A kernel does not tell JAX along which axes its results differ, so check_vma=True would
        # refuse it. Its results differ along the axes of all arguments.
        with check_vma(False):
            results = self.local(*args)
        return tuple(lax.pcast(r, tuple(axes), to="varying") for r in results)

    def _explicit(self, *args: Array) -> tuple[Array, ...]:
        mesh = array_mesh(*args)
        given = [jax.typeof(a).sharding.spec for a in args]
        inputs, outputs, local = self._specs(mesh, args, given)
        run = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return tuple(run(*map(resharded, args, inputs)))

    def _rule(self) -> str:
        """Writes the axes as a Shardy rule: `abm, ab -> m` becomes `a b m, a b -> m`."""
        return " -> ".join(", ".join(map(" ".join, side)) for side in (self.inputs, self.outputs))

    def _auto(self) -> Callable:
        def partition(mesh, arg_shapes, result_shapes):
            given = [a.sharding.spec for a in arg_shapes]
            inputs, outputs, local = self._specs(mesh, arg_shapes, given, result_shapes)
            sharding = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)  # noqa: E731
            return mesh, local, sharding(outputs), sharding(inputs)

        def infer(mesh, arg_shapes, result_shapes):
            given = [a.sharding.spec for a in arg_shapes]
            outputs = self._specs(mesh, arg_shapes, given, result_shapes)[1]
            return tuple(NamedSharding(mesh, spec) for spec in outputs)

        run = custom_partitioning(lambda *args: tuple(self._local((), self._lengths(args))(*args)))
        run.def_partition(
            partition,
            infer_sharding_from_operands=infer,
            sharding_rule=self._rule(),
            need_replication_factors=tuple(self.whole),
        )
        return lambda first, *rest: run(_not_exported_p.bind(first), *rest)
