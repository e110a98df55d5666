"""What is trained: everything, or LoRA and QLoRA beside frozen weights, through qwix.

    model = apply_lora(Llama(config, compute), "qlora-qv", rank=8)
    params = add_lora(model, base_params, key, input_ids)  # or jax.eval_shape(model.init, ...)
    trained, frozen = partition(params, "qlora-qv")

    def loss(trained, frozen, batch):
        params = combine(trained, frozen, compute.dtype)
        ...  # model.apply({"params": params}, ...)

    grads = jax.grad(loss)(trained, frozen, batch)
    opt_state = optimizer.init(trained)

LoRA: Hu et al. 2021 (arXiv:2106.09685), y = x W + (alpha / rank) (x A) B with W frozen. LoRA-FA:
Zhang et al. 2023 (arXiv:2308.03303), A frozen too. QLoRA: Dettmers et al. 2023
(arXiv:2305.14314), W in 4-bit NormalFloat.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

Train = Literal["full", "lora-qv", "lora-all", "lora-fa-qv", "lora-fa-all", "qlora-qv", "qlora-all"]
Model = TypeVar("Model", bound=nn.Module)
Params = dict[str, Any]

#: Module names of the Denses inside a model's layers; a head is none of them.
DENSES = (
    *("query", "key", "value", "attention_output"),
    *("intermediate", "output", "gate", "up", "down"),
    "reduction",
)
#: Modules that no pretrained encoder has: the Dense before RoBERTa's classifier is another one.
HEADS = ("dense", "classifier")


def apply_lora(model: Model, train: Train, rank: int = 8, alpha: float = 16.0) -> Model:
    """The model with LoRA beside its Denses, and their weights in NF4 where `train` says so.

    Its output is the model's while B is zero, as at first. Denses are found by name, see `DENSES`;
    "qv" means query and value. They are `nn.Dense`s and `nn.DenseGeneral`s: qwix 0.1.8 fails on an
    `nn.Einsum`. Norms must be merged into Denses before.

    Args:
      model: a linen module with a field `compute`. Its `param_dtype` must be `dtype`: the frozen
        weights are used as they are. ("full" takes any model, and leaves it as it is.)
      train: what is trained, see `partition`.
      rank: columns of A, rows of B.
      alpha: the product of A and B counts alpha / rank.

    Raises:
      ValueError: no such `train`, rank below 1, or the two dtypes differ.
    """
    if train not in get_args(Train):
        raise ValueError(f"train={train!r}, accepted are {', '.join(get_args(Train))}")
    if train == "full":
        return model
    if rank < 1:
        raise ValueError(f"rank={rank}, accepted is 1 or more")
    compute = model.compute  # pyright: ignore[reportAttributeAccessIssue]
    if jnp.dtype(compute.param_dtype) != jnp.dtype(compute.dtype):
        raise ValueError(
            f"train={train!r} with param_dtype={jnp.dtype(compute.param_dtype)} and "
            f"dtype={jnp.dtype(compute.dtype)}, accepted are equal ones"
        )
    # Here: a model that is trained in full needs no qwix.
    import qwix
    from lowmembp_examples.lora_provider import Provider

    targets = ("query", "value") if train.endswith("qv") else DENSES
    weights = {"weight_qtype": "nf4"} if train.startswith("qlora") else {}
    rules = [qwix.LoraRule(module_path=_modules(targets), rank=rank, alpha=alpha, **weights)]
    if weights:
        rules.append(qwix.QuantizationRule(module_path=_modules(DENSES), **weights))
    return qwix.apply_lora_to_model(model, Provider(rules))


def _modules(names: tuple[str, ...]) -> str:
    return rf"(.*/)?({'|'.join(names)})"


def add_lora(model: nn.Module, base: Mapping[str, Any], key: jax.Array, *inputs: Any) -> Params:
    """Parameters of `apply_lora`'s model from those of the model it was given.

    Args:
      model: what `apply_lora` returned.
      base: the model's own parameters, floating arrays.
      key: draws A, from qwix's he_uniform; B is zero.
      *inputs: of the model, arrays or `jax.ShapeDtypeStruct`s; only shapes count.

    Returns:
      `base`, its weights quantized where the model has them so, with A and B beside them.

    Raises:
      ValueError: names what `base` lacks or has too much.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    init = lambda key: flatten_dict(model.init(key, *zeros)["params"])  # noqa: E731
    abstract, given = jax.eval_shape(init, key), flatten_dict(base)
    lora = {path for path in abstract if _is_lora(path)}
    if given.keys() ^ abstract.keys() ^ lora:
        difference = ["/".join(path) for path in given.keys() ^ abstract.keys() - lora]
        raise ValueError(f"base does not fit the model, the difference is {sorted(difference)}")

    def init_lora(key):
        params = init(key)
        return {path: params[path] for path in lora}  # what is not returned is not computed

    params = jax.jit(init_lora)(key)
    for path, leaf in given.items():
        params[path] = _quantize_like(abstract[path], leaf)
    return unflatten_dict(params)


def _quantize_like(abstract: Any, weight: Any) -> Any:
    if not hasattr(abstract, "how"):
        return weight

    from lowmembp_examples.lora_provider import quantize as quantize_array

    def quantize(weight):
        return abstract.replace(array=quantize_array(weight, abstract.how))

    # nn.scan stacked the layers, qwix saw one.
    if jax.eval_shape(quantize, weight) != abstract:
        quantize = jax.vmap(quantize)
    return jax.jit(quantize)(weight)


def _is_lora(path: tuple[str, ...]) -> bool:
    return path[-1].endswith(("_lora_a", "_lora_b"))


def partition(params: Mapping[str, Any], train: Train) -> tuple[Params, Params]:
    """The parameters that are trained and those that are frozen, two trees.

    Trained are with "full" all; with the others B, with all but LoRA-FA A as well, and the head
    that fine-tuning makes anew, see `HEADS`.

    Args:
      params: of the model that `apply_lora` returned; leaves may be abstract.
      train: what `apply_lora` was given.
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
    """The parameters again: the inverse of `partition`.

    Args:
      trained, frozen: from `partition`. The trained may be master weights of another dtype.
      dtype: of the computation. A and B are cast to it; all else the modules cast themselves.
    """
    # A module casts an array of NumPy, and qwix then does not know it for its weight.
    leaves = jax.tree.map(jnp.asarray, flatten_dict(trained) | flatten_dict(frozen))
    cast = {path: leaf.astype(dtype) for path, leaf in leaves.items() if _is_lora(path)}
    return unflatten_dict(leaves | cast)
