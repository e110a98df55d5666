"""The settings of `lm.patch`."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from lowmembp_jax._arguments import as_choice, as_float_dtype
from lowmembp_jax.compression.formats import format_name
from lowmembp_jax.operators.norms import RESIDUALS, Residual

ACTIVATIONS, NORMS = ("gelu", "silu"), ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class Settings:
    ops: frozenset[str]
    bits: int
    norm_dtype: jnp.dtype | None
    norm_residual: Residual
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    compress: tuple[str, ...] = ()
    checkpoint: bool = False
    compress_dtype: str | None = None

    def compresses(self, place: str) -> bool:
        return _matches(self.compress, place)

    def check_patterns(self, places: Sequence[str]) -> None:
        """Raises ValueError if a pattern matches none of the modules that were called.

        The message names modules that occur several times, such as the blocks of a model.
        """
        for name in ("compress", "include", "exclude") if places else ():
            for pattern in getattr(self, name) or ():
                if not any(_matches((pattern,), place) for place in places):
                    kinds = Counter(re.sub(r"\d+", "*", place) for place in places if place)
                    order = sorted(kinds, key=lambda kind: (kinds[kind] == 1, len(kind)))
                    examples = ", ".join(map(repr, order[:6])) or "none, because it is one module"
                    raise ValueError(
                        f"patch: {name}: {pattern!r} matches none of the {len(places)} modules "
                        f"that were called; their paths are {examples}"
                    )

    def why_not(self, op: str, place: str) -> str | None:
        """Why the settings leave an operator at a place alone; None if they do not."""
        names = place.split("/")
        parents = ["/".join(names[: end + 1]) for end in range(len(names))]
        if self.include is not None and not any(_matches(self.include, at) for at in parents):
            return "not in include"
        if any(_matches(self.exclude, at) for at in parents):
            return "in exclude"
        return None


def _matches(patterns: Sequence[str], place: str) -> bool:
    names = place.split("/")
    return any(
        len(parts) == len(names) and all(map(fnmatchcase, names, parts))
        for parts in (pattern.split("/") for pattern in patterns)
    )


def check_settings(
    activations: Any,
    bits: Any,
    norms: Any,
    norm_dtype: Any,
    norm_residual: Any,
    include: Any,
    exclude: Any,
    compress: Any,
    checkpoint: Any,
    compress_dtype: Any,
) -> Settings:
    """Makes settings of the arguments of `lm.patch`, and raises its errors."""
    patterns = _paths("compress", compress)
    within = None if include is None else _paths("include", include)
    without = _paths("exclude", exclude)
    stored = format_name(compress_dtype, "patch: compress_dtype")
    if not isinstance(checkpoint, bool):
        raise TypeError(f"patch: checkpoint: expected True or False, got {checkpoint!r}")
    by_default = not patterns and not checkpoint
    ops = _chosen("activations", activations, ACTIVATIONS, by_default)
    ops |= _chosen("norms", norms, NORMS, by_default)
    if not (ops or patterns or checkpoint):
        raise ValueError(
            "patch: nothing to do: expected one of activations, norms, compress and checkpoint"
        )
    bits = as_choice(bits, "patch: bits", (2, 4))
    norm_residual = as_choice(norm_residual, "patch: norm_residual", RESIDUALS)
    if norm_dtype is not None:
        norm_dtype = as_float_dtype(norm_dtype, "patch: norm_dtype")
    return Settings(
        ops, bits, norm_dtype, norm_residual, within, without, patterns, checkpoint, stored
    )


def _paths(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"patch: {name}: expected paths of modules, got {given!r}")
    return tuple(patterns)


def _chosen(name: str, given: Any, known: tuple[str, ...], default: bool) -> frozenset[str]:
    given = default if given is None else given
    if isinstance(given, bool):
        return frozenset(known if given else ())
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not set(names) <= set(known):
        words = ", ".join(map(repr, known))
        raise TypeError(
            f"patch: {name}: expected None, True, False or some of {words}, got {given!r}"
        )
    return frozenset(names)
