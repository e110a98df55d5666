"""Programs with published measurements of memory or time on a GPU, for `published.py`."""

from collections import defaultdict
from functools import partial
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lowmembp_examples.trainer.sharding import BATCH, make_mesh, shardings
from lowmembp_examples.trainer.step import OptimizerConfig, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.models import llama
from lowmembp_jax.models.families import FAMILIES
from lowmembp_jax.models.workload import MODELS, workload

MIB, GIB = 2**20, 2**30
#: Bytes a second from one H100 to another, measured with p2pBandwidthLatencyTest (NCCL, issue
#: 1264): 380 of 450 GB/s.
NVLINK = "380GB"
#: Every published recipe for MaxText on GPUs sets this option.
NO_REMATERIALIZATION = {"xla_disable_hlo_passes": "rematerialization"}


def array(*shape: int, dtype: Any = jnp.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def memory(device: str, unit: int, fn: Any, *args: Any, **options: Any) -> dict[str, float]:
    """Returns `memory_analysis()`'s temporaries and arguments, and the planner's peak."""
    sizes = lm.memory.compile_for(fn, *args, device=device, **options).memory_analysis()
    assert sizes is not None
    return {
        "temporaries": sizes.temp_size_in_bytes / unit,
        "arguments": sizes.argument_size_in_bytes / unit,
        "peak": lm.memory.plan(fn, *args, device=device, **options).peak / unit,
    }


def scan_of_layers(device: str, offload: bool) -> dict[str, float]:
    """Returns MiB of the gradient of 10 layers, with their inputs on the device or on the host."""

    def layer(x, weights):
        w1, w2 = weights
        return checkpoint_name(x, "x") @ w1 @ w2, None

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False) if offload else layer

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    weights = array(10, 256, 1024), array(10, 1024, 256)
    return memory(device, MIB, jax.grad(loss), weights, array(256, 256))


def adam(device: str, offload: bool) -> dict[str, float]:
    """Returns GiB of a step of 4 layers of 7,168 x 7,168, Adam's state on the device or host."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate=0.1))
    place = partial(NamedSharding, Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    on_device, on_host = place(memory_kind="device"), place(memory_kind="pinned_host")

    def gelu(x):
        return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))

    def loss(params, x):
        out = x
        for number in range(1, 5):
            out = gelu(out @ params[f"w{number}"])
        squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.mean((out - x) ** 2) + 0.001 * squares

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        if offload:
            state = jax.device_put(state, on_device)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = array(7168, 7168)
    params = {f"w{number}": x for number in range(1, 5)}
    state = jax.eval_shape(optimizer.init, params)
    if not offload:
        return memory(device, GIB, jax.jit(step, donate_argnums=(0, 1)), params, state, x)
    state = jax.tree.map(lambda s: array(*s.shape, dtype=s.dtype, sharding=on_host), state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(on_device, on_host))
    return memory(device, GIB, jitted, params, state, x)


def llama_fsdp(examples: int) -> dict[str, float]:
    """Returns the seconds of MaxText's Llama 2-7B on 8 H100s, and TFLOP/s as MaxText counts them.

    Unrolled layers save products and attention (`minimal_flash`). A text has 4,096 tokens. Float32
    master weights and AdamW's state are divided over 8 GPUs; weights are gathered in bfloat16.

    Args:
      examples: examples per GPU.
    """
    tokens, gpus = 4096, 8
    work = MODELS["llama-7b"](
        batch=gpus * examples, method="products", tokens=tokens, device="h100", layers="unrolled"
    )
    state, _, batch = work.args
    mesh = make_mesh([f"fsdp={gpus}"], lm.memory.topology("h100", gpus).devices)
    own = shardings(state, mesh)
    plan = lm.memory.plan(
        _gathering(work, mesh),
        *work.args,
        device="h100",
        donate=work.donate_argnums,
        in_shardings=(own, None, jax.tree.map(lambda _: NamedSharding(mesh, BATCH), batch)),
        out_shardings=(own, None),
        link_bandwidth=NVLINK,
        compiler_options=NO_REMATERIALIZATION,
    )
    seconds = plan.cost.estimated_seconds
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    # As in MaxText's `calculate_tflops_training_per_device`, half of the scores are masked.
    flops = 6 * parameters * tokens * examples + 6 * 32 * 4096 * tokens**2 * examples
    return {"step": seconds, "TFLOP/s": flops / seconds / 1e12}


def llama_context_parallel(layers: Literal["scan", "unrolled"]) -> dict[str, float]:
    """Returns the GB of temporaries of MaxText's Llama 3-8B with context parallelism over 8 H200s.

    One text has 131,072 tokens. Each GPU has 16,384 of them and gathers keys and values.
    """
    tokens, gpus, axis = 131072, 8, "fsdp"
    config = llama.LlamaConfig(
        *(4096, 32, 32, 14336),
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=tokens,
        rope_theta=500000.0,
    )
    mesh = make_mesh([f"{axis}={gpus}"], lm.memory.topology("h200", gpus).devices)
    own_part = P(None, axis, None, None)
    of_one_gpu = llama.attention

    def attention(q, k, v, implementation, *, causal):
        def part(q, k, v):
            k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
            # A mask changes no memory, and cuDNN has no mask for a part of the queries.
            return of_one_gpu(q, k, v, implementation)

        return jax.shard_map(
            part, mesh=mesh, in_specs=(own_part,) * 3, out_specs=own_part, check_vma=False
        )(q, k, v)

    work = workload(
        FAMILIES["llama"],
        config,
        batch=1,
        method="products",
        tokens=tokens,
        device="h200",
        layers=layers,
    )
    state, _, batch = work.args
    # In a loop, XLA itself gathers the parameters layer by layer.
    step = _gathering(work, mesh) if layers == "unrolled" else work.step
    own = shardings(state, mesh)
    with mock.patch.object(llama, "attention", attention):
        compiled = lm.memory.compile_for(
            step,
            *work.args,
            device="h200",
            donate_argnums=work.donate_argnums,
            in_shardings=(own, None, jax.tree.map(lambda _: NamedSharding(mesh, P()), batch)),
            out_shardings=(own, None),
            compiler_options=NO_REMATERIALIZATION,
        )
    sizes = compiled.memory_analysis()
    assert sizes is not None
    return {"temporaries": sizes.temp_size_in_bytes / 1e9}


def _gathering(work: lm.memory.Workload, mesh: Mesh) -> Any:
    """Returns the trainer's step with parameters that are gathered in bfloat16 before their use."""
    whole, loss_of = NamedSharding(mesh, P()), work.loss
    assert loss_of is not None

    def loss(params, frozen, batch):
        gathered = jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), whole), params
        )
        return loss_of(gathered, frozen, batch), None

    return make_step(loss, make_optimizer(OptimizerConfig(), steps=1000))


def layer_products(device: str) -> dict[str, float]:
    """Returns milliseconds of TransformerEngine's products of a layer, in bfloat16."""
    tokens, sizes = 15872, ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
    gpu = lm.memory.get_device(device)
    found: dict[str, float] = defaultdict(float)
    for terms, features in sizes:
        x, w, y = (
            array(*shape, dtype=jnp.bfloat16)
            for shape in ((tokens, terms), (terms, features), (tokens, features))
        )
        for name, product, args in (
            ("forward", lambda x, w: x @ w, (x, w)),
            ("gradient of the input", lambda y, w: y @ w.T, (y, w)),
            ("gradient of the weights", lambda x, y: x.T @ y, (x, y)),
        ):
            compiled = lm.memory.compile_for(product, *args, device=device)
            found[name] += 1e3 * lm.memory.cost(compiled, gpu).estimated_seconds
    return dict(found)


def against_checkpointed(model: str, **options: Any) -> dict[str, float]:
    """Returns by how many percent the operators change peak, intermediate results and time.

    The baseline is `norm+activation`, whose residuals are nearest to PyTorch's. Mesa's time has the
    same baseline.
    """
    plans = {}
    for method in ("norm+activation", "lowmembp", "mesa"):
        work = MODELS[model](method=method, device="h200", **options)
        plans[method] = lm.memory.plan(
            work.step, *work.args, device="h200", donate=work.donate_argnums, parts=work.parts
        )
    baseline, operators, mesa = plans.values()

    def change(after: float, before: float) -> float:
        return 100 * (after / before - 1)

    return {
        "peak": change(operators.peak, baseline.peak),
        "intermediates": change(operators.most_intermediates, baseline.most_intermediates),
        "time": change(operators.cost.estimated_seconds, baseline.cost.estimated_seconds),
        "time of Mesa": change(mesa.cost.estimated_seconds, baseline.cost.estimated_seconds),
    }
