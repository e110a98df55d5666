"""Folds the scale and bias of norms into the following Denses, for whole parameter trees."""

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

from lowmembp_jax._arguments import as_items

# {name}, or in a Dense's path also {name+1} and {name-1}.
_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)([+-]\d+)?\}")


@dataclass(frozen=True)
class MergeRule:
    """Names one norm, or a pattern of norms, and the Denses that read its output.

    Attributes:
      norm: path of the norm's module in the parameter tree, joined by "/". `{name}` matches one or
        more characters other than "/".
      denses: path or paths of the Denses. `{name}` has its value from the norm's path; `{name+1}`
        and `{name-1}` are the next and the previous number, because the last norm of a post-LN
        layer feeds the next layer. A name that is not in the norm's path matches anything.
      keep: leaves scale and bias in the tree, for a residual branch that applies them itself
        (post-LN). The Denses must still read the output without them.
      add_bias: adds a bias, in the kernel's dtype, to Denses without one if the norm has a bias.
      skip_unconsumed: skips norms without any of their Denses, such as the last layer's norm
        before `{i+1}`. At least one norm must have its Denses.
    """

    norm: str
    denses: str | Sequence[str]
    keep: bool = False
    add_bias: bool = False
    skip_unconsumed: bool = False

    def __post_init__(self):
        denses = as_items(self.denses)
        if not denses or not all(isinstance(path, str) for path in denses):
            raise self.error(f"denses: expected one path or more, got {self.denses!r}")
        object.__setattr__(self, "denses", denses)

    def error(self, message: str) -> ValueError:
        return ValueError(f"merge_norm_affine: rule {self.norm!r}: {message}")


def as_rules(rules: Any) -> list[MergeRule]:
    """Converts `rules`, or a mapping from norms to Denses, to a list of rules."""
    if isinstance(rules, Mapping):
        rules = [MergeRule(norm, denses) for norm, denses in rules.items()]
    found = [*as_items(rules)]
    for rule in found:
        if not isinstance(rule, MergeRule):
            raise TypeError(
                f"merge_norm_affine: rules: expected a mapping from norm to Denses or "
                f"lm.MergeRule objects, got {rule!r}"
            )
    return found


def resolve(rule: MergeRule, modules: Mapping) -> Iterator[tuple[str, list[str]]]:
    """Yields the path of each norm that a rule matches, and the paths of its Denses."""
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
            hint = "" if any(found) else " (skip_unconsumed=True skips it)"
            raise rule.error(
                f"norm {norm[0]!r}{hint}: no Dense {missing!r} in params; {_near(missing, modules)}"
            )
        consumed = True
        yield norm[0], [dense for denses in found for dense in denses]
    if not consumed:
        raise rule.error(
            f"none of the {len(norms)} matching norms has any of the Denses {rule.denses}"
        )


def _regex(rule: MergeRule, pattern: str) -> re.Pattern[str]:
    regex, names = "", set()
    # `split` gives text, name, offset, text, name, offset, ..., text.
    parts = [*_CAPTURE.split(pattern), None, None]
    for text, name, offset in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if "{" in text or "}" in text:
            raise rule.error(
                f"expected a name in the braces of {pattern!r}: {{i}}, or {{i+1}} in a Dense"
            )
        if offset:
            raise rule.error(
                f"{{{name}{offset}}} in {pattern!r}: expected {{{name}}} without {offset}; offsets "
                f"work only in Denses, for names in the norm's path"
            )
        regex += re.escape(text)
        if name:
            regex += f"(?P={name})" if name in names else f"(?P<{name}>[^/]+)"
            names.add(name)
    return re.compile(regex)


def _substitute(rule: MergeRule, pattern: str, captured: Mapping[str, str]) -> str:
    """Fills the values of the norm's path into a Dense's pattern."""

    def value(capture: re.Match) -> str:
        name, offset = capture.groups()
        given = captured.get(name, capture[0])
        if name not in captured or not offset:
            return given
        if not given.isdecimal():
            raise rule.error(f"{capture[0]} in {pattern!r}: expected a number, got {given!r}")
        return str(int(given) + int(offset)).zfill(len(given))

    return _CAPTURE.sub(value, pattern)


def _near(path: str, modules: Mapping) -> str:
    near = difflib.get_close_matches(path, modules, n=4, cutoff=0.5)
    return f"nearest are {near}" if near else f"params has {sorted(modules)[:8]}"


def merge_norm_affine(
    params: Mapping[str, Any], rules: Mapping[str, str | Sequence[str]] | Iterable[MergeRule]
) -> Any:
    """Folds scale and bias of LayerNorm or RMSNorm into the Denses that follow.

    Because (y s + b) W + c = y (s W) + (b W + c), the norm needs no scale and bias. Then
    `lm.ms_layer_norm` saves nothing but the norm's output. Source: LowMemoryBP
    (arXiv:2406.16282), section 5, merging the affine of MS-LN.

        params = lm.merge_norm_affine(params, {
            "layer_{i}/norm1": ["layer_{i}/query", "layer_{i}/key", "layer_{i}/value"],
            "layer_{i}/norm2": "layer_{i}/fc1",
            "norm": "head",
        })

    In a post-LN model, the residual branch applies scale and bias itself:

        params = lm.merge_norm_affine(params, [
            lm.MergeRule("layer_{i}/attn_norm", "layer_{i}/fc1", keep=True),
            lm.MergeRule("layer_{i}/out_norm",
                         ["layer_{i+1}/query", "layer_{i+1}/key", "layer_{i+1}/value"],
                         keep=True, skip_unconsumed=True),
        ])

    The merged model needs norms with `use_scale=False, use_bias=False`. The norms' parameters are
    removed from the tree unless the rule sets `keep`, and so are modules that become empty.

    Name every reader of the norm's output. Between a norm and its Denses, the model may only slice,
    transpose or roll tokens. Zero padding is different: where Swin fills up its windows, the merged
    model must pad with -bias / scale (`keep`). Merge outside jit, before you add LoRA or quantize.

    Args:
      params: `{"params": ..., ...}` or the tree inside it, where the rules' paths start. Nested
        dicts, FrozenDicts or an `nnx.State`. Norms hold `scale`, `bias` or both, floating, `[D]`,
        or `[L, D]` if `nn.scan` stacked L layers. All axes but the last are layers, unless only
        features fit the Denses. Denses hold `kernel` `[D, *outputs]` and optionally `bias`
        `[*outputs]`, with L in front if stacked. D may be several leading axes, as in DenseGeneral.
        Leaves are NumPy or JAX arrays, `jax.ShapeDtypeStruct`s, or one of these in a box such as
        `nn.Partitioned` or `nnx.Param`. Integers in paths, as in an `nnx.List`, are written like
        names: "blocks/{i}/norm1".
      rules: a mapping from a norm's path to the path or paths of its Denses, or `MergeRule`s. See
        `MergeRule` for patterns in paths. No rules change nothing.

    Returns:
      A new tree of the same containers. Changed leaves are computed in float64, rounded to their
      own dtype and stay on their devices. All other leaves are the leaves of `params`.

    Raises:
      TypeError: params is not a mapping, or rules are not rules.
      ValueError: a norm or a Dense does not exist; a norm has no scale and no bias; shapes do not
        fit; a Dense has no bias after a norm with one (see `add_bias`); a norm or a Dense is named
        twice; a Dense has leaves other than a floating kernel and bias (LoRA, quantized); a result
        is too large for its dtype.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"merge_norm_affine: params: expected a mapping, got {type(params).__name__}"
        )
    if isinstance(params, nnx.State):  # a State of States has another tree than a State of dicts
        return nnx.State(merge_norm_affine(_as_dicts(params), rules))
    if isinstance(params.get("params"), Mapping):
        return _like(params, {**params, "params": merge_norm_affine(params["params"], rules)})
    modules = dict(_modules(params, ""))
    # All checks run before the arithmetic, which takes minutes on a large model.
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
    """The leaf `name` of a module without its box, or None."""
    if name not in module:
        return None
    # A box such as nn.Partitioned or nnx.Param has one array; a quantized kernel has several.
    leaves = jax.tree.leaves(module[name])
    is_tree = isinstance(module[name], Mapping | list | tuple)
    if is_tree or len(leaves) != 1 or not hasattr(leaves[0], "dtype"):
        raise rule.error(f"{path}/{name}: expected one array, got {type(module[name]).__name__}")
    if not jnp.issubdtype(leaves[0].dtype, np.floating):
        raise rule.error(f"{path}/{name}: expected a floating dtype, got {leaves[0].dtype}")
    return leaves[0]


def _check(rule: MergeRule, norm: str, dense: str, modules: Mapping) -> tuple[list, int, int]:
    """Checks a norm and a Dense.

    Returns scale, bias, kernel and the Dense's bias; the axis of the kernel where the layers end;
    the axis where the inputs end.
    """
    leaves = [_array(rule, norm, modules[norm], name) for name in ("scale", "bias")]
    leaves += [_array(rule, dense, modules[dense], name) for name in ("kernel", "bias")]
    scale, bias, kernel, shift = leaves
    extra = sorted(map(str, modules[norm].keys() - {"scale", "bias"}))
    if extra or (scale is None and bias is None):
        raise rule.error(
            f"norm {norm!r}: expected a scale, a bias or both and nothing else, got "
            f"{extra or 'nothing'}"
        )
    if kernel is None:
        raise rule.error(
            f"{dense!r}: expected a Dense with a kernel, got {sorted(map(str, modules[dense]))} "
            f"(untie a head that is tied to the embedding first)"
        )
    if extra := sorted(map(str, modules[dense].keys() - {"kernel", "bias"})):
        raise rule.error(
            f"Dense {dense!r}: expected only kernel and bias, got the leaf {extra[0]!r}; add LoRA "
            f"and other readers of the norm's output after merging"
        )
    if bias is not None and shift is None and not rule.add_bias:
        raise rule.error(
            f"norm {norm!r} has a bias, but Dense {dense!r} has no bias to fold it into; "
            f"add_bias=True in its lm.MergeRule adds one"
        )
    if scale is not None and bias is not None and scale.shape != bias.shape:
        raise rule.error(
            f"{norm}: expected the same shape, got scale {scale.shape} and bias {bias.shape}"
        )
    if len({isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves if leaf is not None}) > 1:
        raise rule.error(
            f"{norm!r} and {dense!r}: expected only arrays or only ShapeDtypeStructs, got both"
        )
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
    """The parameters of a Dense after its norm's scale and bias are folded in."""
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
    """A new bias, in a variable if the kernel is in one; the kernel's sharding is not copied."""
    return type(kernel)(bias) if isinstance(kernel, nnx.Variable) else bias


def _float64(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float64)


def _replace(rule: MergeRule, path: str, box: Any, like: Any, value: np.ndarray) -> Any:
    """Returns `value` in `box`, in the dtype and on the devices of `like`."""
    with np.errstate(over="ignore"):
        rounded = value.astype(like.dtype)
    if not np.all(np.isfinite(rounded) | ~np.isfinite(value)):
        raise rule.error(
            f"{path} reaches {np.abs(value).max():.3g}, which is too large for {like.dtype}"
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
            # Flax has no entry for a module without parameters.
            if child and not new:
                continue
            child = new
        children[key] = child
    return _like(node, children)
