"""The table of residuals: rows, totals, text, JSON and CSV."""

import csv
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

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
      op: the operation that made it, such as `gelu`, `Dense`, `regelu2 codes`, or its
        `checkpoint_name`; "cast of an input" for parameters cast to the compute dtype; "copy of an
        input" for inputs that a scan stacks again; the argument's name for arguments.
      primitive: primitive of the equation that made it.
      module: path of the module (or of the `jax.named_scope`s) that made it, such as
        `Bert/layer_3/intermediate`.
      source: `file.py:line` of the innermost code outside JAX, Flax and this library.
      used_by: the operations that read it in the backward, `module: op` each.
      is_output: whether the function also returns it.
    """

    kind: Kind
    bytes: int
    shape: tuple[int, ...]
    times: int
    dtype: str
    op: str
    primitive: str
    module: str
    source: str
    used_by: tuple[str, ...]
    is_output: bool

    @property
    def shared(self) -> bool:
        """Whether several operations read it. It is saved only once."""
        return len(self.used_by) > 1


def _layer(module: str, depth: int | None) -> str:
    parts = module.split("/")
    if depth is None:
        numbered = (i for i, part in enumerate(parts, 1) if re.search(r"\d$", part))
        depth = next(numbered, 2)
    return "/".join(parts[:depth])


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
        totals: dict[str, int] = {}
        for row in self.kept:
            totals[key(row)] = totals.get(key(row), 0) + row.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def by_op(self) -> dict[str, int]:
        """Bytes saved by each kind of operation, the largest first."""
        return self._by(lambda row: row.op)

    def by_layer(self, depth: int | None = None) -> dict[str, int]:
        """Bytes saved by each layer, the largest first; "" stands for code outside modules.

        Args:
          depth: number of names of the module path that make a layer. None means up to the first
            name that ends in a number, such as `Bert/layer_3`, or two names if there is none.
        """
        return self._by(lambda row: _layer(row.module, depth))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Formats rows and totals as JSON, and writes them to `path` if it is given."""
        report = {
            "total_bytes": self.total_bytes,
            "by_op": self.by_op(),
            "by_layer": self.by_layer(),
            "rows": [asdict(row) for row in self.rows],
        }
        return _write(json.dumps(report, indent=2) + "\n", path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Formats the rows as CSV with a header, and writes them to `path` if it is given.

        A shape is `8x16`, and semicolons separate the readers.
        """
        text = io.StringIO()
        names = [field.name for field in fields(Residual)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            shape, used_by = "x".join(map(str, row.shape)), "; ".join(row.used_by)
            writer.writerow(asdict(row) | {"shape": shape, "used_by": used_by})
        return _write(text.getvalue(), path)

    def __str__(self) -> str:
        shown, hidden = self.kept[:_SHOWN], self.kept[_SHOWN:]
        table = [("MiB", "array", "op", "module", "source", "read by")]
        table += [
            (
                f"{row.bytes / _MIB:,.2f}",
                (f"{row.times} x " if row.times != 1 else "")
                + f"{row.dtype}[{','.join(map(str, row.shape))}]",
                row.op,
                row.module,
                row.source,
                f"{len(row.used_by)} ops" if row.shared else "".join(row.used_by),
            )
            for row in shown
        ]
        lines = _aligned(table)
        if hidden:
            size = sum(row.bytes for row in hidden) / _MIB
            lines.append(f"... and {len(hidden)} smaller arrays, {size:,.2f} MiB")
        lines += ["", f"{self.total_bytes / _MIB:,.2f} MiB saved in {len(self.kept)} arrays"]
        for title, totals in (("op", self.by_op()), ("layer", self.by_layer())):
            rows = [(f"{size / _MIB:,.2f}", name or "-") for name, size in totals.items()]
            more = [f"... and {len(rows) - _SHOWN} more"] * (len(rows) > _SHOWN)
            lines += ["", *_aligned([("MiB", title), *rows[:_SHOWN]]), *more]
        return "\n".join(lines)


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Aligns a table: the first column to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _write(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text)
    return text
