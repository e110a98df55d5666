"""The table of residuals: rows, totals, text and JSON."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from lowmembp_jax.memory.result import aligned

Kind = Literal["kept", "host", "argument", "constant", "unused"]

_MIB = 1024**2
_SHOWN = 40


@dataclass(frozen=True)
class Residual:
    """One array that autodiff saves from the forward for the backward.

    Attributes:
      kind: "kept" takes additional device memory; "host" is offloaded by a policy; "argument" is an
        argument of the function, and "constant" an array it closes over or a literal, which are in
        memory anyway; "unused" is returned by autodiff, but no gradient depends on it, so a
        compiled step does not save it.
      bytes: bytes of all `times` arrays; `jnp.uint2` has 4 elements a byte.
      shape: shape of one array.
      times: number of arrays: the product of the lengths of the scans that stack them.
      dtype: name of the dtype.
      op: its `checkpoint_name`, or the primitive that made it, such as `dot_general`; the
        argument's name for arguments.
      module: path of the module (or of the `jax.named_scope`s) that made it, such as
        `Bert/layer_3/intermediate`.
      source: `file.py:line` of the innermost code outside JAX, Flax and this library.
      is_output: whether the function also returns it.
    """

    kind: Kind
    bytes: int
    shape: tuple[int, ...]
    times: int
    dtype: str
    op: str
    module: str
    source: str
    is_output: bool


def _layer(module: str) -> str:
    parts = module.split("/")
    numbered = (i for i, part in enumerate(parts, 1) if re.search(r"\d$", part))
    return "/".join(parts[: next(numbered, 2)])


@dataclass(frozen=True)
class Residuals:
    """A table of residuals with a row for each array, the largest first.

    Attributes:
      rows: all rows, including arrays that take no additional device memory.
    """

    rows: tuple[Residual, ...]

    @property
    def kept(self) -> tuple[Residual, ...]:
        """The rows that take additional device memory."""
        return tuple(row for row in self.rows if row.kind == "kept")

    @property
    def total_bytes(self) -> int:
        """Bytes of `kept`."""
        return sum(row.bytes for row in self.kept)

    def _by(self, key: Callable[[Residual], str]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.kept:
            totals[key(row)] += row.bytes
        return dict(totals.most_common())

    def by_op(self) -> dict[str, int]:
        """Bytes saved by each kind of operation, the largest first."""
        return self._by(lambda row: row.op)

    def by_layer(self) -> dict[str, int]:
        """Bytes saved by each layer, the largest first; "" stands for code outside modules.

        A layer is the module path up to the first name that ends in a number, such as
        `Bert/layer_3`, or two names if there is none.
        """
        return self._by(lambda row: _layer(row.module))

    def to_json(self) -> str:
        """Formats rows and totals as JSON."""
        report = {
            "total_bytes": self.total_bytes,
            "by_op": self.by_op(),
            "by_layer": self.by_layer(),
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(report, indent=2) + "\n"

    def __str__(self) -> str:
        shown, hidden = self.kept[:_SHOWN], self.kept[_SHOWN:]
        rows = [
            (
                f"{row.bytes / _MIB:,.2f}",
                (f"{row.times} x " if row.times != 1 else "")
                + f"{row.dtype}[{','.join(map(str, row.shape))}]",
                row.op,
                row.module,
                row.source,
            )
            for row in shown
        ]
        head = ("MiB", "array", "op", "module", "source")
        lines = aligned(head, *rows, left=head[1:])
        if hidden:
            size = sum(row.bytes for row in hidden) / _MIB
            lines.append(f"... and {len(hidden)} smaller arrays, {size:,.2f} MiB")
        lines += ["", f"{self.total_bytes / _MIB:,.2f} MiB saved in {len(self.kept)} arrays"]
        for title, totals in (("op", self.by_op()), ("layer", self.by_layer())):
            rows = [(f"{size / _MIB:,.2f}", name or "-") for name, size in totals.items()]
            more = [f"... and {len(rows) - _SHOWN} more"] * (len(rows) > _SHOWN)
            lines += ["", *aligned(("MiB", title), *rows[:_SHOWN], left=(title,)), *more]
        return "\n".join(lines)
