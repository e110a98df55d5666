"""What devices send each other, counted from the compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AS_PUBLISHED
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowmembp_jax.memory.devices import get_device, topology
from lowmembp_jax.memory.roofline.cost import LAUNCH_SECONDS, cost

DEVICE = dataclasses.replace(
    get_device("h200"),
    bandwidth=1e12,
    matrix_flops={"bf16": 1e15},
    vector_flops=5e13,
    calibration=AS_PUBLISHED,
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


MIB = 2**20
# Sends 7 MiB to each of 8 devices, and reads and writes 9 MiB: 9.4 us of the device's own memory.
GATHER = """%x = u8[1048576]{0} parameter(0)
%s = (u8[1048576]{0}, u8[8388608]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8]
"""
OWN = 9 * MIB / 1e12 + LAUNCH_SECONDS
# Reads and writes 64 MiB each.
BESIDE = "%y = u8[67108864]{0} parameter(1)\n%n = u8[67108864]{0} negate(%y)\n"
KERNEL = 2 * 64 * MIB / 1e12 + LAUNCH_SECONDS
GATHERED = "%d = u8[8388608]{0} all-gather-done(%s)\n"


def overlapped(*lines, link_bandwidth=None):
    text = "ENTRY %main (x: u8[1048576], y: u8[67108864]) -> u8[1] {\n" + "".join(lines) + "}\n"
    return cost(text, DEVICE, link_bandwidth=link_bandwidth)


def waits(*lines, link_bandwidth):
    """Seconds of a program, and of the collectives in it."""
    total = overlapped(*lines, link_bandwidth=link_bandwidth)
    return total.estimated_seconds, total.by("kind")["collective"].estimated_seconds


def test_a_transfer_runs_beside_kernels():
    # 7 MiB at 100 GB/s take 73.4 us, 9.4 of them in the device's memory; the kernel takes 136.2.
    total, collective = waits(GATHER, BESIDE, GATHERED, link_bandwidth=1e11)
    assert 7 * MIB / 1e11 < KERNEL
    assert (total, collective) == pytest.approx((OWN + KERNEL, OWN))


def test_the_step_waits_for_what_is_left_of_a_transfer():
    transfer = 7 * MIB / 1e10
    total, collective = waits(GATHER, BESIDE, GATHERED, link_bandwidth=1e10)
    assert total == pytest.approx(transfer + LAUNCH_SECONDS)
    assert total > OWN + KERNEL
    assert collective == pytest.approx(total - KERNEL)


def test_a_transfer_with_nothing_beside_it_takes_its_whole_time():
    total, collective = waits(GATHER, GATHERED, BESIDE, link_bandwidth=1e11)
    assert collective == pytest.approx(7 * MIB / 1e11 + LAUNCH_SECONDS)
    assert total == pytest.approx(collective + KERNEL)


def test_transfers_share_a_link():
    second = GATHER.splitlines()[1].replace("%s", "%s2") + "\n"
    ends = GATHERED + GATHERED.replace("%s", "%s2").replace("%d", "%d2")
    total, _ = waits(GATHER, second, BESIDE, ends, link_bandwidth=1e10)
    # The second begins when the first ends; the device's own part of the first is before both.
    link = 7 * MIB / 1e10 - 9 * MIB / 1e12
    assert total == pytest.approx(OWN + 2 * link, rel=0.01)
    assert total > 1.9 * 7 * MIB / 1e10


def test_a_transfer_that_nothing_waits_for_ends_with_the_program():
    total = overlapped(GATHER, BESIDE, link_bandwidth=1e10)
    assert total.estimated_seconds == pytest.approx(total.link_bytes / 1e10 + LAUNCH_SECONDS)


def test_a_copy_to_the_host_runs_beside_kernels():
    host = "u8[1048576]{0:S(5)}"
    start = f"%x = u8[1048576]{{0}} parameter(0)\n%s = ({host}, u8[1048576]{{0}}, u32[]) "
    start += "copy-start(%x)\n"
    end = f"ROOT %d = {host} copy-done(%s)\n"
    beside, alone = overlapped(start, BESIDE, end), overlapped(start, end)
    assert alone.host_bytes == beside.host_bytes == MIB
    assert alone.estimated_seconds == pytest.approx(MIB / DEVICE.host_bandwidth + LAUNCH_SECONDS)
    # 16.4 us of PCIe, 1 of them in the device's memory, beside a kernel of 136 us.
    own = MIB / 1e12 + LAUNCH_SECONDS
    assert beside.estimated_seconds == pytest.approx(own + KERNEL)


def test_the_body_of_a_loop_overlaps_and_repeats():
    body = GATHER + BESIDE + GATHERED
    text = f"%body (x: u8[1048576]) -> u8[1] {{\n{body}}}\n" + (
        "%condition (x: u8[1048576]) -> pred[] {\n%x = u8[1048576]{0} parameter(0)\n}\n"
        "ENTRY %main (x: u8[1048576]) -> u8[1] {\n%x = u8[1048576]{0} parameter(0)\n"
        "ROOT %w = u8[1048576]{0} while(%x), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}\n}\n'
    )
    total = cost(text, DEVICE, link_bandwidth=1e11)
    assert total.estimated_seconds == pytest.approx(7 * (OWN + KERNEL))
