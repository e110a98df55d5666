"""How the backward needs an array of the forward."""

import math
from typing import Any, NamedTuple

from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import rules
from lowmembp_jax.compression._scaled_float8 import Rows

#: How the backward needs an array; a higher need includes the lower ones. A WHOLE array must not be
#: stored in fewer bits, but a product of rounded numbers may compute it again.
NOT, ROUNDED, WHOLE, EXACT = range(4)


class Need(NamedTuple):
    """How the backward needs a variable.

    Attributes:
      level: NOT, ROUNDED, WHOLE or EXACT.
      name: the `checkpoint_name` that it gets later.
      saved: the policy saves it by this name.
      rows: the rows of the statistic of it that the backward needs.
      host: the policy offloads it by this name.
    """

    level: int = NOT
    name: str | None = None
    saved: bool = False
    rows: Rows | None = None
    host: bool = False

    def join(self, other: "Need") -> "Need":
        """Combines the needs of two readers; `other` reads later in the function."""
        return Need(
            max(self.level, other.level),
            self.name or other.name,
            self.saved or other.saved,
            self.rows or other.rows,
            self.host or other.host,
        )


def before(rows: Rows | None, eqn: Any, atom: Any) -> Rows | None:
    """Converts rows of an elementwise equation's result to rows of its operand."""
    if rows is None or not rules.rule(eqn).elementwise or isinstance(atom, core.Literal):
        return None
    if atom.aval.size != math.prod(rows.shape):
        return None
    if operation(eqn) == "transpose":
        if rows.shape != eqn.outvars[0].aval.shape:
            return None
        return Rows(atom.aval.shape, tuple(eqn.params["permutation"][i] for i in rows.axes))
    return rows


def narrows(eqn: Any, need: Need) -> bool:
    """Whether an equation casts to a smaller dtype an array that is best saved after the cast.

    Such an array is saved by its name, or it is stored unrounded.
    """
    is_cast = operation(eqn) == "convert_element_type"
    if not is_cast or not (need.saved or need.level > ROUNDED):
        return False
    return eqn.params["new_dtype"].itemsize < eqn.invars[0].aval.dtype.itemsize
