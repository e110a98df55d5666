"""Rules that name norms and the Denses that follow them in a parameter tree."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# {name}, or {name+1} and {name-1} on the Denses' side.
_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)([+-]\d+)?\}")


@dataclass(frozen=True)
class MergeRule:
    """One norm, or one pattern of norms, and the Denses that consume its output.

    Attributes:
      norm: path of the norm's module in the parameter tree, joined by "/". `{name}` stands for
        one or more characters other than "/".
      denses: paths of the Denses, or one of them. `{name}` is what it was in the norm's path;
        `{name+1}` and `{name-1}` count on from it, as the norm that ends a post-LN layer feeds
        the next one; a name that the norm's path does not have stands for anything.
      keep: leave scale and bias where they are, for a residual branch that applies them itself
        (post-LN); the Denses must still get the output without them.
      add_bias: give a bias, in the kernel's dtype, to Denses that have none and follow a norm
        with one.
      skip_unconsumed: pass over norms that have none of their Denses, such as the last layer's
        in front of `{i+1}`. At least one norm must have them.
    """

    norm: str
    denses: str | Sequence[str]
    keep: bool = False
    add_bias: bool = False
    skip_unconsumed: bool = False

    def __post_init__(self):
        denses = (self.denses,) if isinstance(self.denses, str) else tuple(self.denses)
        if not denses:
            raise self.error("names no Dense, expected one path or more")
        object.__setattr__(self, "denses", denses)

    def error(self, message: str) -> ValueError:
        return ValueError(f"merge_norm_affine: rule {self.norm!r}: {message}")


def as_rules(rules) -> list[MergeRule]:
    """Rules, or a mapping from norms to Denses, as rules."""
    if isinstance(rules, Mapping):
        rules = [MergeRule(norm, denses) for norm, denses in rules.items()]
    rules = [rules] if isinstance(rules, MergeRule) else list(rules)
    for rule in rules:
        if not isinstance(rule, MergeRule):
            raise TypeError(
                f"merge_norm_affine: rules must be a mapping from norm to Denses or "
                f"lm.MergeRule objects, got {rule!r}"
            )
    if not rules:
        raise ValueError("merge_norm_affine: no rules given, expected one or more")
    return rules


def resolve(rule: MergeRule, modules: Mapping) -> Iterator[tuple[str, list[str]]]:
    """The norms that a rule names among modules by their paths, each with its Denses."""
    norms = [match for match in map(_regex(rule, rule.norm).fullmatch, modules) if match]
    if not norms:
        raise rule.error(f"no module of that path in params; {_near(rule.norm, modules)}")
    consumed = False
    for norm in norms:
        patterns = [_substitute(rule, pattern, norm.groupdict()) for pattern in rule.denses]
        found = [list(filter(_regex(rule, pattern).fullmatch, modules)) for pattern in patterns]
        if rule.skip_unconsumed and not any(found):
            continue
        if not all(found):
            missing = patterns[found.index([])]
            hint = "" if any(found) else " (skip_unconsumed=True passes it over)"
            raise rule.error(
                f"norm {norm[0]!r}{hint}: no Dense {missing!r} in params; {_near(missing, modules)}"
            )
        consumed = True
        yield norm[0], [dense for denses in found for dense in denses]
    if not consumed:
        raise rule.error(
            f"none of the {len(norms)} norms it matches has any of the Denses {rule.denses}"
        )


def _regex(rule: MergeRule, pattern: str) -> re.Pattern[str]:
    regex, names = "", set()
    # `split` gives text, name, offset, text, name, offset, ..., text.
    parts = [*_CAPTURE.split(pattern), None, None]
    for text, name, offset in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if "{" in text or "}" in text:
            raise rule.error(
                f"braces in {pattern!r} must hold a name, {{i}}, or {{i+1}} in a Dense"
            )
        if offset:
            raise rule.error(
                f"{{{name}{offset}}} in {pattern!r}: expected {{{name}}} without {offset}; only "
                f"Denses count on from a name in the norm's path"
            )
        regex += re.escape(text)
        if name:
            regex += f"(?P={name})" if name in names else f"(?P<{name}>[^/]+)"
            names.add(name)
    return re.compile(regex)


def _substitute(rule: MergeRule, pattern: str, captured: Mapping[str, str]) -> str:
    """A Dense's pattern with the names that the norm's path gave a value."""

    def value(capture: re.Match) -> str:
        name, offset = capture.groups()
        given = captured.get(name, capture[0])
        if name not in captured or not offset:
            return given
        if not given.isdecimal():
            raise rule.error(f"{capture[0]} in {pattern!r}: {given!r} is not a number")
        return str(int(given) + int(offset)).zfill(len(given))

    return _CAPTURE.sub(value, pattern)


def _near(path: str, modules: Mapping) -> str:
    near = difflib.get_close_matches(path, modules, n=4, cutoff=0.5)
    return f"nearest are {near}" if near else f"params has {sorted(modules)[:8]}"
