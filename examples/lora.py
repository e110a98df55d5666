"""Full training, or LoRA and QLoRA beside frozen weights, through qwix.

    model = apply_lora(Llama(config, compute), "qlora-qv", rank=8)
    params = add_lora(model, base_params, key, input_ids)  # or jax.eval_shape(model.init, ...)
    trained, frozen = partition(params, "qlora-qv")

    def loss(trained, frozen, batch):
        params = combine(trained, frozen, compute.dtype)
        ...  # model.apply({"params": params}, ...)

    grads = jax.grad(loss)(trained, frozen, batch)
    opt_state = optimizer.init(trained)

LoRA (Hu et al. 2021, arXiv:2106.09685) computes y = x W + (alpha / rank) (x A) B with W frozen.
LoRA-FA (Zhang et al. 2023, arXiv:2308.03303) also freezes A. QLoRA (Dettmers et al. 2023,
arXiv:2305.14314) stores W in 4-bit NormalFloat.
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

#: Module names of the Denses inside a model's layers. The head is not one of them.
DENSES = (
    *("query", "key", "value", "attention_output"),
    *("intermediate", "output", "gate", "up", "down"),
    "reduction",
)
#: Modules that pretrained encoders do not have. "dense" is the Dense before RoBERTa's classifier.
HEADS = ("dense", "classifier")


def apply_lora(model: Model, train: Train, rank: int = 8, alpha: float = 16.0) -> Model:
    """Adds LoRA to a model's Denses, and stores their weights in NF4 for QLoRA.

    B starts at zero, so the output does not change at first. The Denses are found by name (see
    `DENSES`); "qv" means query and value. They must be `nn.Dense` or `nn.DenseGeneral`, because
    qwix 0.1.8 fails on `nn.Einsum`. Merge norms into the Denses before this call.

    Args:
      model: a linen module with a field `compute`, whose `param_dtype` must equal `dtype`, because
        frozen weights are not cast. "full" takes any model and returns it unchanged.
      train: what to train, see `partition`.
      rank: the number of columns of A and of rows of B.
      alpha: the product of A and B is multiplied by alpha / rank.

    Raises:
      ValueError: `train` is unknown; rank is below 1; or the two dtypes differ.
    """
    if train not in get_args(Train):
        raise ValueError(
            f"apply_lora: train: expected one of {', '.join(get_args(Train))}, got {train!r}"
        )
    if train == "full":
        return model
    if rank < 1:
        raise ValueError(f"apply_lora: rank: expected 1 or more, got {rank}")
    compute = model.compute  # pyright: ignore[reportAttributeAccessIssue]
    if jnp.dtype(compute.param_dtype) != jnp.dtype(compute.dtype):
        raise ValueError(
            f"apply_lora: model: expected equal dtypes for train={train!r}, got "
            f"param_dtype={jnp.dtype(compute.param_dtype)} and dtype={jnp.dtype(compute.dtype)}"
        )
    # Imported here, because full training does not need qwix.
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
    """Adds LoRA's parameters to the parameters of the original model.

    Args:
      model: the model that `apply_lora` returned.
      base: the original model's parameters, floating arrays.
      key: draws A with qwix's he_uniform. B is zero.
      *inputs: the model's inputs, arrays or `jax.ShapeDtypeStruct`s. Only their shapes are used.

    Returns:
      `base` with A and B. Its weights are quantized if `train` is QLoRA.

    Raises:
      ValueError: `base` lacks parameters or has unknown ones. The message names them.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    init = lambda key: flatten_dict(model.init(key, *zeros)["params"])  # noqa: E731
    abstract, given = jax.eval_shape(init, key), flatten_dict(base)
    lora = {path for path in abstract if _is_lora(path)}
    if given.keys() ^ abstract.keys() ^ lora:
        difference = ["/".join(path) for path in given.keys() ^ abstract.keys() - lora]
        raise ValueError(
            f"add_lora: base: expected the model's parameters, missing or unknown are "
            f"{sorted(difference)}"
        )

    def init_lora(key):
        params = init(key)
        return {path: params[path] for path in lora}  # XLA computes only the returned arrays

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

    # nn.scan stacked the layers, but qwix saw one.
    if jax.eval_shape(quantize, weight) != abstract:
        quantize = jax.vmap(quantize)
    return jax.jit(quantize)(weight)


def _is_lora(path: tuple[str, ...]) -> bool:
    return path[-1].endswith(("_lora_a", "_lora_b"))


def partition(params: Mapping[str, Any], train: Train) -> tuple[Params, Params]:
    """Splits parameters into a tree of trained and a tree of frozen ones.

    "full" trains all parameters. The other modes train B, the new head of fine-tuning (see `HEADS`)
    and, except for LoRA-FA, A.

    Args:
      params: parameters of the model that `apply_lora` returned. Leaves may be abstract.
      train: the argument of `apply_lora`.
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
    """Merges the two trees of `partition`.

    Args:
      trained, frozen: trees from `partition`. `trained` may hold master weights of another dtype.
      dtype: the dtype of the computation. A and B are cast to it. The modules cast the rest.
    """
    # A module casts a NumPy array, and qwix then does not recognize it as the weight.
    leaves = jax.tree.map(jnp.asarray, flatten_dict(trained) | flatten_dict(frozen))
    cast = {path: leaf.astype(dtype) for path, leaf in leaves.items() if _is_lora(path)}
    return unflatten_dict(leaves | cast)
