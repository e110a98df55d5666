"""Replaces the devices of a mesh that the step itself names by the planned GPUs.

`jax.jit(in_shardings=...)`, `with_sharding_constraint`, `shard_map(mesh=...)` and `pmap` write the
mesh into the traced program. This module replaces it there by a mesh with the same axes.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.lowering.meshes import is_on_host, on_mesh, sizes
from lowmembp_jax.memory.lowering.step_arguments import StepError, is_array

_Sharding = Sharding | PartitionSpec | None


class OwnMesh(NamedTuple):
    """A traced step that names a mesh.

    Attributes:
      mesh: the mesh that the step names.
      program: the step's trace.
      out_tree: the structure of its results.
    """

    mesh: Mesh
    program: core.ClosedJaxpr
    out_tree: Any

    def step_on(self, mesh: Mesh) -> Callable[..., Any]:
        """Makes the step over `mesh` instead of the mesh that it names.

        Raises:
          StepError: `mesh` has other axes or sizes.
        """
        if sizes(self.mesh) != sizes(mesh):
            raise StepError(
                f"mesh: the step names the mesh {sizes(self.mesh)}: expected None or that mesh, "
                f"got {sizes(mesh)}"
            )
        flat = core.jaxpr_as_fun(jaxprs.with_parameters(self.program, functools.partial(_on, mesh)))

        on_host = _returned_to_host(self.program.jaxpr)

        def step(*args):
            out = flat(*jax.tree.leaves(args))
            # Inside another jax.jit, out_shardings do not move arrays to the host.
            out = [
                jax.device_put(x, jax.memory.Space.Host) if moves else x
                for x, moves in zip(out, on_host, strict=True)
            ]
            return jax.tree.unflatten(self.out_tree, out)

        return step

    def args_on(self, args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
        """Shards the arguments over `mesh`, by their own shardings or the program's, if any."""
        leaves, tree = jax.tree.flatten(args)
        given = [_said(getattr(leaf, "sharding", None)) for leaf in leaves]
        said = _first_said(given, _asked_of_inputs(self.program.jaxpr))
        shardings = [None if one is None else on_mesh(mesh, one, "args") for one in said]
        return jax.tree.unflatten(tree, list(map(_struct, leaves, shardings)))


def find_own_mesh(fn: Callable[..., Any], args: tuple[Any, ...]) -> OwnMesh | None:
    """Traces `fn`, a function of arrays; None if it names no mesh or cannot be traced.

    Raises:
      StepError: `fn` names several meshes, or one with explicit axes.
    """
    try:
        # Without jax.jit, operations in shard_map would keep their devices.
        traced = jax.make_jaxpr(jax.jit(fn), return_shape=True)
        program, out = traced(*without_shardings(args))
    except Exception:  # the user's code runs here, and its error was raised before
        return None
    mesh = _mesh_in(program.jaxpr)
    return mesh and OwnMesh(mesh, program, jax.tree.structure(out))


def without_shardings(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes shapes and dtypes of the arguments."""
    return jax.tree.map(lambda x: _struct(x) if is_array(x) else x, args)


def _struct(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.result_type(x), sharding=sharding)


def _mesh_in(jaxpr: core.Jaxpr) -> Mesh | None:
    found = list(dict.fromkeys(_meshes(jaxpr)))
    if len({tuple(sizes(mesh).items()) for mesh in found}) > 1:
        raise StepError(
            "the step: expected one mesh, got the meshes "
            f"{', '.join(str(sizes(mesh)) for mesh in found)}"
        )
    if any(AxisType.Explicit in mesh.axis_types for mesh in found):
        raise StepError(
            f"the step names the mesh {sizes(found[0])}, whose axes are explicit: pass it to the "
            "plan as `mesh`, and use only PartitionSpecs in the step"
        )
    return found[0] if found else None


def _meshes(jaxpr: core.Jaxpr) -> Iterator[Mesh]:
    for equation in jaxprs.every_equation(jaxpr):
        for value in jax.tree.leaves(list(equation.params.values())):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield mesh


def _on(mesh: Mesh, value: Any) -> Any:
    """Replaces the mesh in an equation's parameter by `mesh`, if it has one."""
    if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh) and not value.mesh.empty:
        # Over the mesh itself JAX would drop the memory kind of a move to the host or back.
        return NamedSharding(mesh.abstract_mesh, value.spec, memory_kind=value.memory_kind)
    return mesh if isinstance(value, Mesh) and not value.empty else value


def _returned_to_host(jaxpr: core.Jaxpr) -> list[bool]:
    """Whether a `jax.jit` returns each output in the host's memory."""
    found: dict[Any, bool] = {}
    for equation in jaxpr.eqns:
        if "out_shardings" in equation.params:
            inside = _returned_to_host(jaxprs.bodies(equation)[0])
            own = map(is_on_host, equation.params["out_shardings"])
            found.update(zip(equation.outvars, map(operator.or_, own, inside), strict=True))
    return [not isinstance(x, core.Literal) and found.get(x, False) for x in jaxpr.outvars]


def _asked_of_inputs(jaxpr: core.Jaxpr) -> list[_Sharding]:
    """The sharding that the program first asks of each input, or None."""
    asked: dict[Any, _Sharding] = {}
    for equation in jaxpr.eqns:
        for operand, said in zip(equation.invars, _asked(equation), strict=False):
            if said is not None and not isinstance(operand, core.Literal):
                asked.setdefault(operand, said)
    return [asked.get(var) for var in jaxpr.invars]


def _asked(equation: Any) -> list[_Sharding]:
    """The shardings that a jit, a shard_map or a constraint asks of its operands."""
    params = equation.params
    if equation.primitive.name == "sharding_constraint":
        return [_said(params["sharding"])]
    if "in_specs" in params:
        return list(params["in_specs"])
    given = params.get("in_shardings")
    if given is None:
        return []
    inside = _asked_of_inputs(jaxprs.bodies(equation)[0])
    return _first_said(map(_said, given), inside)


def _first_said(first: Iterable[_Sharding], second: Iterable[_Sharding]) -> list[_Sharding]:
    # A replicated sharding is falsy in Python, so this compares with None.
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def _said(sharding: Any) -> _Sharding:
    is_said = isinstance(sharding, NamedSharding) or is_on_host(sharding)
    return sharding if is_said else None
