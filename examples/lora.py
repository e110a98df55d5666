"""LoRA, LoRA-FA and QLoRA for the library's models, through qwix.

    model = apply_lora(family.build(config, compute), "qlora-qv", rank=8)
    params = add_lora(model, base_params, key, input_ids)
    trained, frozen = partition(params, "qlora-qv")

    def loss(trained, frozen, batch):
        params = combine(trained, frozen, compute.dtype)
        ...  # model.apply({"params": params}, ...)

    grads = jax.grad(loss)(trained, frozen, batch)

LoRA (Hu et al. 2021, arXiv:2106.09685) computes y = x W + (alpha / rank) (x A) B with W frozen.
LoRA-FA (Zhang et al. 2023, arXiv:2308.03303) also freezes A. QLoRA (Dettmers et al. 2023,
arXiv:2305.14314) stores W in 4-bit NormalFloat.

The planner plans it without a GPU:

    lowmembp plan --model examples/lora.py:workload --options train=lora-all
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

import lowmembp_jax as lm
from lowmembp_jax.models.attention import choose_attention
from lowmembp_jax.models.families import MODELS
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.workload import abstract_batch, make_loss, make_optimizer, workload_of_loss

Train = Literal["full", "lora-qv", "lora-all", "lora-fa-qv", "lora-fa-all", "qlora-qv", "qlora-all"]
Params = dict[str, Any]

#: Module names of the Denses inside a model's layers. The head is not one of them.
DENSES = ("query", "key", "value", "attention_output", "intermediate", "output")
DENSES += ("gate", "up", "down", "reduction")
#: Modules that fine-tuning starts anew and trains. "dense" is before RoBERTa's classifier.
HEADS = ("dense", "classifier")


def apply_lora(model: nn.Module, train: Train, rank: int = 8, alpha: float = 16.0) -> nn.Module:
    """Adds LoRA to a model's Denses (see `DENSES`), and stores their weights in NF4 for QLoRA.

    B starts at zero, so the output does not change at first. Merge norms before this call. "full"
    returns the model unchanged. Otherwise its `param_dtype` must equal its `dtype`, because frozen
    weights are not cast.
    """
    if train not in get_args(Train):
        expected = ", ".join(get_args(Train))
        raise ValueError(f"apply_lora: train: expected one of {expected}, got {train!r}")
    if train == "full":
        return model
    compute = model.compute  # pyright: ignore[reportAttributeAccessIssue]
    if jnp.dtype(compute.param_dtype) != jnp.dtype(compute.dtype):
        raise ValueError(
            f"apply_lora: model: expected equal dtypes for train={train!r}, got "
            f"param_dtype={jnp.dtype(compute.param_dtype)} and dtype={jnp.dtype(compute.dtype)}"
        )

    def modules(names):
        return rf"(.*/)?({'|'.join(names)})"

    targets = ("query", "value") if train.endswith("qv") else DENSES
    weights = {"weight_qtype": "nf4"} if train.startswith("qlora") else {}
    rules = [qwix.LoraRule(module_path=modules(targets), rank=rank, alpha=alpha, **weights)]
    if weights:
        rules.append(qwix.QuantizationRule(module_path=modules(DENSES), **weights))
    return qwix.apply_lora_to_model(model, _Provider(rules))


def add_lora(model: nn.Module, base: Mapping[str, Any], key: jax.Array, *inputs: Any) -> Params:
    """Returns `base`, the parameters without LoRA, with A and B, and quantized for QLoRA.

    `model` comes from `apply_lora`. `key` draws A with qwix's he_uniform, and B is zero. Only the
    shapes and dtypes of the model's `inputs` are used.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    init = lambda key: flatten_dict(model.init(key, *zeros)["params"])  # noqa: E731
    abstract = jax.eval_shape(init, key)
    # XLA computes only the returned arrays.
    params = jax.jit(lambda key: {path: x for path, x in init(key).items() if _is_lora(path)})(key)
    for path, weight in flatten_dict(base).items():
        how = getattr(abstract[path], "how", None)
        params[path] = weight if how is None else _quantized(abstract[path], weight)
    return unflatten_dict(params)


def _quantized(abstract: Any, weight: Any) -> Any:
    def one(weight):
        return abstract.replace(array=_quantize(weight, abstract.how))

    # nn.scan stacked the layers, but qwix saw one.
    is_stack = jax.eval_shape(one, weight) != abstract
    return jax.jit(jax.vmap(one) if is_stack else one)(weight)


def _is_lora(path: tuple[str, ...]) -> bool:
    return path[-1].endswith(("_lora_a", "_lora_b"))


def partition(params: Mapping[str, Any], train: Train) -> tuple[Params, Params]:
    """Splits parameters into a tree of trained and a tree of frozen ones.

    "full" trains all parameters. The other modes train B, the head of a classifier (see `HEADS`)
    and, except for LoRA-FA, A.
    """

    def is_trained(path):
        if train == "full" or any(name in HEADS for name in path):
            return True
        return path[-1].endswith("_lora_b" if "-fa-" in train else ("_lora_a", "_lora_b"))

    leaves = flatten_dict(params)
    trained = {path: leaf for path, leaf in leaves.items() if is_trained(path)}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}
    return unflatten_dict(trained), unflatten_dict(frozen)


def combine(trained: Mapping[str, Any], frozen: Mapping[str, Any], dtype: Any) -> Params:
    """Merges the trees of `partition`. A and B are cast to `dtype`, and modules cast the rest."""
    # A module casts a NumPy array. qwix then finds no weight and silently leaves LoRA out.
    leaves = jax.tree.map(jnp.asarray, flatten_dict(trained) | flatten_dict(frozen))
    cast = {path: leaf.astype(dtype) for path, leaf in leaves.items() if _is_lora(path)}
    return unflatten_dict(leaves | cast)


def fold_lora(params: Mapping[str, Any], scale: float) -> Params:
    """Returns W + scale A B in float32, for the model without LoRA. `scale` is alpha / rank."""
    leaves, folded = flatten_dict(params), {}
    for path, leaf in leaves.items():
        if _is_lora(path):
            continue
        if hasattr(leaf, "how"):
            # Scanned layers are stacked.
            leaf = (jax.vmap(qwix.dequantize) if "layers" in path else qwix.dequantize)(leaf.array)
        weight = np.asarray(leaf).astype(np.float32)
        a, b = (leaves.get((*path[:-1], f"{path[-1]}_lora_{part}")) for part in "ab")
        if a is not None:
            product = np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))
            weight = weight + np.float32(scale) * product.reshape(weight.shape)
        folded[path] = weight
    return unflatten_dict(folded)


def workload(
    model: str = "llama-7b",
    train: Train = "lora-qv",
    method: str = "default",
    batch: int = 4,
    tokens: int = 2048,
    rank: int = 8,
    dtype: str = "bfloat16",
    tiles: int | None = None,
) -> lm.memory.Workload:
    """Makes the abstract training step of a model with LoRA, for the planner.

    The trained parameters and AdamW's state are float32. Image models ignore `tokens`. `tiles` is
    as in `models.layers.Compute`.
    """
    if model not in MODELS:
        raise ValueError(f"workload: model: expected one of {', '.join(MODELS)}, got {model!r}")
    family, config = MODELS[model]
    param_dtype = jnp.dtype("float32" if train == "full" else dtype)
    attention = choose_attention(config, dtype, has_cudnn=True)
    compute = Compute(method, jnp.dtype(dtype), param_dtype, attention, tiles=tiles)
    built = family.build(config, compute)
    built = apply_lora(built, train, rank)
    arrays = abstract_batch(family.task, batch, tokens, config)
    params = jax.eval_shape(built.init, jax.random.key(0), *arrays.inputs)["params"]
    trained, frozen = partition(params, train)
    trained = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), trained)
    mean = make_loss(family.task, built)

    def loss(trained, frozen, batch):
        return mean(combine(trained, frozen, dtype), batch)

    tokens = 0 if family.task == "image-classification" else batch * tokens
    return workload_of_loss(loss, make_optimizer(), trained, frozen, arrays, tokens=tokens)


class _Provider(qwix.LoraProvider):
    """A LoRA provider of qwix 0.1.8 that stores frozen weights in NF4 if a rule says so."""

    def __init__(self, rules):
        super().__init__(rules)
        # PtqProvider takes these as arguments, but its subclass LoraProvider does not pass them on.
        self._qarray_module = SimpleNamespace(quantize=_quantize)
        self._dot_general_fn = _dot_general

    def dot_general(self, lhs, rhs, *args, **kwargs):
        rule, _ = self._get_current_rule_and_op_id("dot_general", only_rule=True)
        if rule is not None and rule.weight_qtype is not None and isinstance(rhs, jax.Array):
            # During initialization, qwix replaces the weight and then finds it by its shape. If the
            # weight is a reshape of another array, like DenseGeneral's first values, qwix follows
            # the reshape instead. It does not follow an op of two arguments, such as this barrier.
            rhs = lax.optimization_barrier((lhs, rhs))[1]
        return super().dot_general(lhs, rhs, *args, **kwargs)


def _quantize(weight: jax.Array, how: Any) -> Any:
    """Quantizes a weight in blocks of 64 along the last input axis, as QLoRA does."""
    *others, last = (axis for axis in range(weight.ndim) if axis not in how.channelwise_axes)
    return qwix.quantize(
        weight.astype(jnp.float32),
        how.qtype,
        channelwise_axes=how.channelwise_axes,
        tiled_axes=dict.fromkeys(others, 1) | {last: math.gcd(64, weight.shape[last])},
        scale_dtype=weight.dtype,
    )


def _dot_general(x, weight, dimension_numbers, **kwargs):
    """Computes the product and saves only the 4-bit weight, where JAX would save 16 bits."""
    inputs = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def dot(x, weight):
        return qwix.dot_general(x, weight, dimension_numbers, **kwargs)

    def backward(weight, g):
        # Without the barrier XLA would keep the 16-bit weight from the forward.
        weight, g = lax.optimization_barrier((weight, g))
        return *jax.linear_transpose(lambda x: dot(x, weight), inputs)(g), None

    product = jax.custom_vjp(dot)
    product.defvjp(lambda x, weight: (dot(x, weight), weight), backward)
    return product(x, weight)
