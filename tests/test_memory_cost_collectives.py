"""What devices send each other, counted from the compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowmembp_jax.memory.devices import get_device, topology
from lowmembp_jax.memory.roofline.cost import LAUNCH_SECONDS, cost

DEVICE = dataclasses.replace(
    get_device("h200"), bandwidth=1e12, matrix_flops={"bf16": 1e15}, vector_flops=5e13
)
N = 4096


@pytest.mark.parametrize(
    "opcode,result,groups,sent",
    [
        ("all-reduce", 1024, "{{0,1,2,3},{4,5,6,7}}", 2 * N * 3 / 4),
        ("all-reduce", 1024, "{}", 2 * N),
        ("all-reduce", 1024, "[4,2]<=[8]", 2 * N / 2),
        ("all-reduce", 1024, "[2,4]<=[4,2]T(1,0)", 2 * N * 3 / 4),
        ("all-reduce", 1024, "mesh['x'=4,'y'=2] {'y'}", 2 * N / 2),
        ("all-reduce", 1024, "mesh['x'=4,'y'=2] {'x','y'}", 2 * N * 7 / 8),
        ("all-reduce", 1024, "mesh['x'=8] {'x':(2)4}", 2 * N * 3 / 4),
        ("all-gather", 4096, "{{0,1,2,3}}", 4 * N * 3 / 4),
        ("reduce-scatter", 256, "{{0,1,2,3}}", N * 3 / 4),
        ("all-to-all", 1024, "{{0,1,2,3}}", N * 3 / 4),
        ("collective-permute", 1024, "{}", N),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives(opcode, result, groups, sent, asynchronous):
    x, y = "f32[1024]{0}", f"f32[{result}]{{0}}"
    attributes = f"channel_id=1, replica_groups={groups}, dimensions={{0}}"
    if asynchronous:
        entry = f"""%s = (({x}), {y}) {opcode}-start(%x), {attributes}
        ROOT %d = {y} {opcode}-done(%s)"""
    else:
        entry = f"ROOT %d = {y} {opcode}(%x), {attributes}"
    text = f"ENTRY %main (x: {x}) -> {y} {{\n%x = {x} parameter(0)\n{entry}\n}}\n"
    total = cost(text, DEVICE)
    assert (total.bytes_read, total.bytes_written) == (N, 4 * result)
    assert (total.link_bytes, total.launches) == (sent, 1)
    assert set(total.by("kind")) == {"collective"}
    slow = cost(text, DEVICE, link_bandwidth=1e3)
    assert slow.estimated_seconds == pytest.approx(sent / 1e3 + LAUNCH_SECONDS)


@pytest.mark.gpu_compiler
def test_collectives_of_eight_devices():
    mesh = Mesh(np.array(topology("h200", 8).devices).reshape(4, 2), ("data", "model"))

    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(jax.lax.dot(x, w)).astype(jnp.float32)))

    def sharded(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    everyone = PartitionSpec(("data", "model"))
    w, x = sharded(PartitionSpec(), 4096, 1024), sharded(everyone, 8192, 4096)
    program = jax.jit(jax.grad(loss)).lower(w, x).compile()
    total = cost(program, DEVICE)
    parts = total.by("kind")
    weight = 4096 * 1024 * 2
    assert parts["collective"].bytes_moved == 2 * weight  # one all-reduce, its start and its done
    assert total.link_bytes == 2 * 7 * weight // 8
    assert total.flops == 2 * 2 * (8192 // 8) * 4096 * 1024  # of one device
    assert total.notes == ("time on the links between devices is left out",)
    linked = cost(program, DEVICE, link_bandwidth=1e9)
    assert linked.by("kind")["collective"].estimated_seconds == pytest.approx(
        total.link_bytes / 1e9, rel=1e-2
    )
    assert linked.notes == ()
    w = sharded(PartitionSpec("data"), 4096, 1024)
    gathered = cost(jax.jit(loss).lower(w, x).compile(), DEVICE).by("kind")["collective"]
    gather = max(gathered.kernels, key=lambda kernel: kernel.bytes_moved)
    assert gather.link_bytes == weight * 3 // 4
    assert (gather.bytes_read, gather.bytes_written) == (weight // 4, weight)
