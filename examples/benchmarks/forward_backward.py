"""An operator as the two programs that training runs of it: forward with residuals, backward."""

from collections.abc import Callable

import jax
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr


def _depends(jaxpr: Jaxpr, place: int) -> bool:
    """Whether a result depends on the first input."""
    wanted = [other == place for other in range(len(jaxpr.outvars))]
    return dce_jaxpr(jaxpr, wanted)[1][0]


class ForwardBackward:
    """`op(x, *parameters)` in two functions to be jitted, with what passes between them.

    The residuals are those of `jax.vjp`, as JAX keeps them under `lax.scan` over layers. (Where
    layers are unrolled, XLA may recompute some.) Those that are in memory anyway are no results of
    `forward`, which would have to copy them: arguments, the output, and `constants`, which
    depend on the parameters alone, such as a reshaped scale.

    Args:
      op: the operator.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Attributes:
      results: of `forward`, abstract.
      inputs: of `backward`, abstract.
    """

    def __init__(self, op: Callable, *args):
        self._op = op
        jaxpr = jax.make_jaxpr(self._all)(*args).jaxpr
        known = {v: ("given", i) for i, v in enumerate([*jaxpr.invars, jaxpr.outvars[0]])}
        self._sources: list[tuple[str, int]] = []
        self._first: dict[str, list[int]] = {"kept": [], "constant": []}
        for place, atom in enumerate(jaxpr.outvars[1:]):
            literal = isinstance(atom, Literal)
            if not literal and atom in known:
                self._sources.append(known[atom])
                continue
            kind = "kept" if _depends(jaxpr, place + 1) else "constant"
            self._sources.append((kind, len(self._first[kind])))
            self._first[kind].append(place)
            if not literal:
                known[atom] = self._sources[-1]
        self.results = y, kept = jax.eval_shape(self.forward, *args)
        self.inputs = args, y, kept, jax.eval_shape(self.constants, *args), y

    def _all(self, *args):
        y, vjp = jax.vjp(self._op, *args)
        leaves, self._tree = jax.tree.flatten(vjp)
        return [y, *leaves]

    def forward(self, *args):
        """The output, and the residuals that have to be written for the backward."""
        y, *leaves = self._all(*args)
        return y, [leaves[place] for place in self._first["kept"]]

    def constants(self, *args):
        """The residuals that depend on the parameters alone: computed once, not timed."""
        leaves = self._all(*args)[1:]
        return [leaves[place] for place in self._first["constant"]]

    def backward(self, args, y, kept, constants, g):
        """Gradients of all arguments. What it does not use is no argument once it is compiled."""
        from_ = {"given": [*args, y], "kept": kept, "constant": constants}
        leaves = [from_[kind][index] for kind, index in self._sources]
        return jax.tree.unflatten(self._tree, leaves)(g)
