"""The affine of a norm, folded into the Denses that follow, for whole parameter trees."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def merge_norm_affine(
    params: Mapping[str, Any], rules: Mapping[str, str | Sequence[str]] | Iterable[MergeRule]
) -> Any:
    """Folds scale and bias of LayerNorm or RMSNorm into the Denses that follow.

    (y s + b) W + c = y (s W) + (b W + c), so that the norm needs no affine and its output is all
    that its backward keeps (`lm.ms_layer_norm`). Source: LowMemoryBP (arXiv:2406.16282),
    section 5, merging the affine of MS-LN.

        params = lm.merge_norm_affine(params, {
            "layer_{i}/norm1": ["layer_{i}/query", "layer_{i}/key", "layer_{i}/value"],
            "layer_{i}/norm2": "layer_{i}/fc1",
            "norm": "head",
        })

    Post-LN, where the residual branch applies the affine again:

        params = lm.merge_norm_affine(params, [
            lm.MergeRule("layer_{i}/attn_norm", "layer_{i}/fc1", keep=True),
            lm.MergeRule("layer_{i}/out_norm",
                         ["layer_{i+1}/query", "layer_{i+1}/key", "layer_{i+1}/value"],
                         keep=True, skip_unconsumed=True),
        ])

    The merged model has `use_scale=False, use_bias=False` at the norms: their parameters, and
    modules left with none, are gone from the tree unless the rule says `keep`. Between a norm and
    its Denses only what commutes with an affine per feature may happen (slicing, transposing or
    rolling tokens), and every consumer of the output must be named. Zero padding does not
    commute: where Swin fills up its windows, the merged model must pad with -bias / scale (`keep`).
    Merge before adding LoRA or quantizing; this runs outside jit.

    Args:
      params: `{"params": ..., ...}` or the tree inside it, which is what rules' paths start from;
        nested dicts, FrozenDicts or an `nnx.State`. Norms hold `scale` and/or `bias`, floating,
        `[D]`, or `[L, D]` where `nn.scan` stacked L layers (all axes but the last are layers;
        where only that fits the Denses, they are features). Denses hold `kernel`
        `[D, *outputs]` and perhaps `bias` `[*outputs]`, with the same L in front when stacked;
        D may be split into several leading axes, as by DenseGeneral. Leaves are NumPy or JAX
        arrays, `jax.ShapeDtypeStruct`s, or boxes around one, `nn.Partitioned` or `nnx.Param`.
        Integers in paths, as of an `nnx.List`, are written like names: "blocks/{i}/norm1".
      rules: norm path -> Dense path(s), or `MergeRule`s, which say what the paths may hold.

    Returns:
      A new tree of the same containers. Changed leaves are computed in float64, rounded once to
      their own dtype and stay on their devices; all others are those of `params`.

    Raises:
      TypeError: params is not a mapping, or rules are not rules.
      ValueError: a norm or a Dense that is not there; a norm without affine; shapes that do not
        fit; a Dense without a bias after a norm with one (see `add_bias`); a norm or a Dense
        named twice; leaves other than floating kernel and bias (LoRA, quantized); a result too
        large for its dtype.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"merge_norm_affine: params must be a mapping, got {type(params).__name__}")
    if isinstance(params, nnx.State):  # states in a state are another tree than dicts in it
        return nnx.State(merge_norm_affine(_as_dicts(params), rules))
    if isinstance(params.get("params"), Mapping):
        return _like(params, {**params, "params": merge_norm_affine(params["params"], rules)})
    modules = dict(_modules(params, ""))
    # Every check comes before the arithmetic, which takes minutes on a large model.
    norms, merges = {}, {}
    for rule in as_rules(rules):
        for norm, denses in resolve(rule, modules):
            if norm in norms:
                raise rule.error(f"norm {norm!r} has a rule already, {norms[norm].norm!r}")
            norms[norm] = rule
            for dense in denses:
                checked = _check(rule, norm, dense, modules)
                if dense in merges:
                    raise rule.error(
                        f"Dense {dense!r} is merged twice, with norm {merges[dense][0]!r} "
                        f"and with norm {norm!r}; expected one norm to a Dense"
                    )
                merges[dense] = norm, checked
    edits: dict[str, Mapping] = {norm: {} for norm, rule in norms.items() if not rule.keep}
    for dense, (norm, checked) in merges.items():
        edits[dense] = _fold(norms[norm], dense, modules[dense], *checked)
    return _rebuild(params, "", edits)


def _as_dicts(node: Any) -> Any:
    return {k: _as_dicts(v) for k, v in node.items()} if isinstance(node, Mapping) else node


def _modules(node: Mapping, prefix: str) -> Iterator[tuple[str, Mapping]]:
    for key, child in node.items():
        if isinstance(child, Mapping):
            yield prefix + str(key), child
            yield from _modules(child, f"{prefix}{key}/")


def _array(rule: MergeRule, path: str, module: Mapping, name: str) -> Any:
    """The leaf of that name, out of its box, or None."""
    if name not in module:
        return None
    # A box such as nn.Partitioned or nnx.Param is a pytree of one array; a quantized one of more.
    leaves = jax.tree.leaves(module[name])
    if len(leaves) != 1 or not hasattr(leaves[0], "dtype"):
        raise rule.error(f"{path}/{name} must be one array, got {type(module[name]).__name__}")
    if not jnp.issubdtype(leaves[0].dtype, np.floating):
        raise rule.error(f"{path}/{name} has dtype {leaves[0].dtype}, expected a floating one")
    return leaves[0]


def _check(rule: MergeRule, norm: str, dense: str, modules: Mapping) -> tuple[list, int, int]:
    """Scale, bias, kernel and the Dense's bias; where layers end and inputs end in the kernel."""
    leaves = [_array(rule, norm, modules[norm], name) for name in ("scale", "bias")]
    leaves += [_array(rule, dense, modules[dense], name) for name in ("kernel", "bias")]
    scale, bias, kernel, shift = leaves
    extra = sorted(map(str, modules[norm].keys() - {"scale", "bias"}))
    if extra or (scale is None and bias is None):
        raise rule.error(
            f"norm {norm!r} holds {extra or 'nothing'}, expected a scale, a bias or both only"
        )
    if kernel is None:
        raise rule.error(
            f"{dense!r} has no kernel, it holds {sorted(map(str, modules[dense]))}; expected a "
            f"Dense (a head tied to the embedding must be untied first)"
        )
    if extra := sorted(map(str, modules[dense].keys() - {"kernel", "bias"})):
        raise rule.error(
            f"Dense {dense!r} has the leaf {extra[0]!r}, expected kernel and bias only: what else "
            f"takes the norm's output, as LoRA does, must be added after merging"
        )
    if bias is not None and shift is None and not rule.add_bias:
        raise rule.error(
            f"norm {norm!r} has a bias and Dense {dense!r} has none to fold it into; "
            f"add_bias=True in its lm.MergeRule adds one"
        )
    if scale is not None and bias is not None and scale.shape != bias.shape:
        raise rule.error(
            f"{norm}/scale has shape {scale.shape} and {norm}/bias {bias.shape}, expected the same"
        )
    if len({isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves if leaf is not None}) > 1:
        raise rule.error(f"{norm!r} and {dense!r} hold arrays and ShapeDtypeStructs, expected one")
    affine: Any = bias if scale is None else scale
    features, shape = affine.shape, kernel.shape
    for stack in reversed(range(len(features))):
        for stop in range(stack + 1, len(shape) + 1):
            if (
                shape[:stack] == features[:stack]
                and math.prod(shape[stack:stop]) == math.prod(features[stack:])
                and (shift is None or shift.shape == shape[:stack] + shape[stop:])
            ):
                return leaves, stack, stop
    given = f"{dense}/kernel has shape {shape}"
    expected = f"({', '.join(map(str, features))}, *outputs)"
    if shift is not None:
        given += f" and {dense}/bias {shift.shape}"
        expected += f" and ({''.join(f'{layers}, ' for layers in features[:-1])}*outputs)"
    raise rule.error(f"{given}, expected {expected} after norm {norm!r} of shape {features}")


def _fold(
    rule: MergeRule, dense: str, module: Mapping, leaves: list, stack: int, stop: int
) -> Mapping:
    """What a Dense holds after the affine of the norm before it."""
    scale, bias, kernel, shift = leaves
    shape = kernel.shape
    out_shape = shape[:stack] + shape[stop:]
    if isinstance(kernel, jax.ShapeDtypeStruct):
        added = {"bias": _boxed(module["kernel"], jax.ShapeDtypeStruct(out_shape, kernel.dtype))}
        return module if bias is None or shift is not None else {**module, **added}
    layers, inputs, outputs = map(math.prod, (shape[:stack], shape[stack:stop], shape[stop:]))
    weight = _float64(kernel).reshape(layers, inputs, outputs)
    new = dict(module)
    if bias is not None:
        moved = (_float64(bias).reshape(layers, 1, inputs) @ weight).reshape(out_shape)
        moved = moved if shift is None else moved + _float64(shift)
        like = kernel if shift is None else shift
        box = module["bias"] if shift is not None else _boxed(module["kernel"], kernel)
        new["bias"] = _replace(rule, f"{dense}/bias", box, like, moved)
    if scale is not None:
        weight = (weight * _float64(scale).reshape(layers, inputs, 1)).reshape(shape)
        new["kernel"] = _replace(rule, f"{dense}/kernel", module["kernel"], kernel, weight)
    return new


def _boxed(kernel: Any, bias: Any) -> Any:
    """A bias that is new, in a variable where its kernel is in one; not with its shardings."""
    return type(kernel)(bias) if isinstance(kernel, nnx.Variable) else bias


def _float64(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float64)


def _replace(rule: MergeRule, path: str, box: Any, like: Any, value: np.ndarray) -> Any:
    """`value` in the box and the dtype of `like`, and where that is a JAX array, on its devices."""
    with np.errstate(over="ignore"):
        if like.dtype not in (np.float64, np.float32, np.float16):
            # ml_dtypes rounds to float32 first, which rounds twice. Rounded to odd on the way,
            # the second rounding sees on which side of a tie the value was.
            near = value.astype(np.float32)
            even = (near != value) & (near.view(np.uint32) & 1 == 0)
            toward = np.where(value > near, np.inf, -np.inf).astype(np.float32)
            rounded = np.where(even, np.nextafter(near, toward), near).astype(like.dtype)
        else:
            rounded = value.astype(like.dtype)
    if not np.all(np.isfinite(rounded) | ~np.isfinite(value)):
        raise rule.error(
            f"{path} reaches {np.abs(value).max():.3g}, too large for its dtype {like.dtype}"
        )
    if isinstance(like, jax.Array):
        rounded = jax.device_put(rounded, like.sharding if like.committed else None)
    return jax.tree.unflatten(jax.tree.structure(box), [rounded])


def _like(node: Mapping, children: Mapping) -> Any:
    return type(node)(children)  # pyright: ignore[reportCallIssue]


def _rebuild(node: Mapping, path: str, edits: Mapping[str, Mapping]) -> Any:
    children = {}
    for key, child in edits.get(path, node).items():
        if isinstance(child, Mapping):
            new = _rebuild(child, f"{path}/{key}" if path else str(key), edits)
            # Flax makes no entry for a module without parameters.
            if child and not new:
                continue
            child = new
        children[key] = child
    return _like(node, children)
