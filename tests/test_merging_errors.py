"""Merging the affine of a norm: what is refused, and what the error says."""

import jax
import numpy as np
import pytest
from merging_trees import layers, small

import lowmembp_jax as lm


def shaped(scale=(4,), kernel=(4, 3), **bias):
    dense = {name: np.ones(shape) for name, shape in bias.items()}
    return {"n": {"scale": np.ones(scale)}, "d": {"kernel": np.ones(kernel), **dense}}


def added(module, **leaves):
    params = small(norm=("scale",))
    params[module] |= leaves
    return params


SMALL = small(norm=("scale",))
ONE = np.float32([1])
ERRORS = {
    "norm not there": (
        {"block_1": {"norm_1": {"scale": ONE}}, "block_2": {}},
        {"block_1/norm1": "d"},
        r"rule 'block_1/norm1': no module of that path in params; nearest are \['block_1/norm_1'",
    ),
    "norm pattern not there": (
        SMALL,
        {"encoder/layer_{i}/norm": "d"},
        r"rule 'encoder/layer_\{i\}/norm': no module .* params has \['d', 'n'\]",
    ),
    "dense not there": (
        {"n": SMALL["n"], "attn": {"query": SMALL["d"]}},
        {"n": ["attn/query", "attn/querry"]},
        r"rule 'n': norm 'n': no Dense 'attn/querry' in params; nearest are \['attn/query'",
    ),
    "a leaf is no module": (SMALL, {"n": "d/kernel"}, r"no Dense 'd/kernel' in params"),
    "norm without affine": (
        {"n": {}, "d": SMALL["d"]},
        {"n": "d"},
        r"norm 'n': expected a scale, a bias or both .*, got nothing",
    ),
    "norm is a Dense": (
        {"n": SMALL["d"], "d": SMALL["d"]},
        {"n": "d"},
        r"norm 'n': expected a scale.*, got \['kernel'\]",
    ),
    "dense is an embedding": (
        {"n": SMALL["n"], "wte": {"embedding": np.ones((3, 4))}},
        {"n": "wte"},
        r"'wte': expected a Dense with a kernel, got \['embedding'\] \(untie a head",
    ),
    "dense without bias": (
        small(dense=("kernel",)),
        {"n": "d"},
        r"norm 'n' has a bias, but Dense 'd' has no bias to fold it into; add_bias=True",
    ),
    "dense merged twice": (
        {"n": SMALL["n"], "m": SMALL["n"], "d": SMALL["d"]},
        {"n": "d", "m": "d"},
        r"rule 'm': Dense 'd' is merged twice, with norm 'n' and with norm 'm'",
    ),
    "dense named twice": (SMALL, {"n": ["d", "d"]}, r"Dense 'd' is merged twice"),
    "unbound name in the Dense": (
        {f"l{i}": small(norm=("scale",)) for i in range(2)},
        {"l{i}/n": "l{j}/d"},
        r"Dense 'l0/d' is merged twice, with norm 'l0/n' and with norm 'l1/n'",
    ),
    "norm in two rules": (
        {"l0": {"n": SMALL["n"], "d": SMALL["d"], "e": SMALL["d"]}},
        {"l{i}/n": "l{i}/d", "l0/n": "l0/e"},
        r"rule 'l0/n': norm 'l0/n' has a rule already, 'l\{i\}/n'",
    ),
    "lora": (
        added("d", kernel_lora_a=np.ones((4, 2)), kernel_lora_b=np.ones((2, 3))),
        {"n": "d"},
        r"Dense 'd': expected only kernel and bias, got the leaf 'kernel_lora_a'",
    ),
    "quantized kernel": (
        added("d", kernel=np.ones((4, 3), np.int8)),
        {"n": "d"},
        r"d/kernel: expected a floating dtype, got int8",
    ),
    "kernel of several arrays": (
        added("d", kernel=(np.ones((4, 3)), np.ones(3))),
        {"n": "d"},
        r"d/kernel: expected one array, got tuple",
    ),
    "kernel is a module": (
        added("d", kernel={"q": np.ones((4, 3)), "s": ONE}),
        {"n": "d"},
        r"d/kernel: expected one array, got dict",
    ),
    "kernel of other width": (
        shaped(kernel=(5, 3), bias=(3,)),
        {"n": "d"},
        r"d/kernel has shape \(5, 3\) and d/bias \(3,\), expected \(4, \*outputs\) and "
        r"\(\*outputs\) after norm 'n' of shape \(4,\)",
    ),
    "kernel of other width, no bias": (
        shaped(kernel=(3, 4)),
        {"n": "d"},
        r"d/kernel has shape \(3, 4\), expected \(4, \*outputs\) after norm",
    ),
    "bias of other width": (shaped(bias=(4,)), {"n": "d"}, r"d/bias \(4,\), expected"),
    "stacks of other length": (
        shaped(scale=(2, 4), kernel=(3, 4, 5), bias=(3, 5)),
        {"n": "d"},
        r"d/kernel has shape \(3, 4, 5\) .* expected \(2, 4, \*outputs\) and \(2, \*outputs\)",
    ),
    "one norm before a stack": (
        shaped(kernel=(2, 4, 5)),
        {"n": "d"},
        r"\(2, 4, 5\), expected \(4,",
    ),
    "scale and bias differ": (
        added("n", bias=ONE),
        {"n": "d"},
        r"n: expected the same shape, got scale \(4,\) and bias \(1,\)",
    ),
    "half abstract": (
        added("d", kernel=jax.ShapeDtypeStruct((4, 3), np.float32)),
        {"n": "d"},
        r"'n' and 'd': expected only arrays or only ShapeDtypeStructs, got both",
    ),
    "overflow": (
        {"n": {"scale": np.float16([300])}, "d": {"kernel": np.float16([[-300]])}},
        {"n": "d"},
        r"d/kernel reaches 9e\+04, which is too large for float16",
    ),
    "no rules": (SMALL, {}, "rules: expected one or more, got none"),
    "no denses": (SMALL, {"n": []}, r"rule 'n': denses: expected one path or more"),
    "count on in the norm": (SMALL, {"l{i+1}": "d"}, r"in 'l\{i\+1\}': expected \{i\} without"),
    "count on from nothing": (SMALL, {"n": "d{i+1}"}, r"in 'd\{i\+1\}': expected \{i\} without"),
    "paths start inside params": (
        {"params": SMALL},
        {"params/n": "params/d"},
        r"rule 'params/n': no module .*params has \['d', 'n'\]",
    ),
    "the last norm feeds nothing": (
        layers("09", "10"),
        {"{i}/ln": "{i+1}/mlp/up"},
        r"rule '\{i\}/ln': norm '10/ln' \(skip_unconsumed=True skips it\): "
        r"no Dense '11/mlp/up' in params; nearest are \['10/mlp/up'",
    ),
    "no norm feeds anything": (
        layers("09", "10"),
        [lm.MergeRule("{i}/ln", "{i+5}/mlp/up", skip_unconsumed=True)],
        r"none of the 2 matching norms has any of the Denses \('\{i\+5\}/mlp/up',\)",
    ),
    "half of its Denses is not none of them": (
        layers("09", "10"),
        [lm.MergeRule("{i}/ln", ["{i}/mlp/up", "{i}/mlp/down"], skip_unconsumed=True)],
        r"norm '09/ln': no Dense '09/mlp/down'",
    ),
    "count on from a word": (
        layers("09"),
        {"09/l{i}": "{i+1}/mlp/up"},
        r"\{i\+1\} in '\{i\+1\}/mlp/up': expected a number, got 'n'",
    ),
    "other braces": (SMALL, {"n": "{d,e}"}, r"expected a name in the braces of '\{d,e\}'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    params, rules, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        lm.merge_norm_affine(params, rules)


def test_type_errors():
    with pytest.raises(TypeError, match="params: expected a mapping, got list"):
        lm.merge_norm_affine([], {"n": "d"})
    with pytest.raises(TypeError, match=r"lm\.MergeRule objects, got \('n', 'd'\)"):
        lm.merge_norm_affine(SMALL, [("n", "d")])
