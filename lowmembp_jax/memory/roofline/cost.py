"""Counts what a compiled program moves and computes, kernel by kernel, and estimates its time.

The numbers come from the program's own instructions, without a GPU. `_traffic.py` counts bytes,
`_flops.py` counts FLOPs, and `seconds.py` makes a time of them by the roofline model (Williams et
al. 2009). One kernel runs after another. A kernel reads an operand from the L2 cache if the kernels
since its last use have touched less than the cache holds.

A transfer between devices, or to the host's memory, runs beside the kernels that XLA schedules
between its start and its end. These kernels lose the time that the transfer's bytes take in the
device's own memory. Transfers of one kind run one after another.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import jax

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program
from lowmembp_jax.memory.roofline._flops import flops
from lowmembp_jax.memory.roofline._traffic import (
    bytes_read,
    bytes_written,
    link_bytes,
    result_shapes,
)
from lowmembp_jax.memory.roofline.seconds import (
    LAUNCH_SECONDS,
    VECTOR_KINDS,
    attention_seconds,
    convolution_seconds,
    instructions,
    product_seconds,
    start_seconds,
    vector_kind,
    vector_seconds,
)
from lowmembp_jax.memory.roofline.totals import Cost, Kernel

# Instructions that launch nothing.
_FREE = {
    "add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element",
    "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip


class _Transfers:
    """Collects the kernels of one computation and the transfers that run beside them."""

    def __init__(self, bandwidth: float):
        self.kernels: list[Kernel] = []
        self._bandwidth = bandwidth  # of the device's own memory
        self._now = 0.0
        self._free: dict[str, float] = defaultdict(float)  # the end of the last transfer, by kind
        self.running: dict[str, list[tuple[int, float]]] = {}  # index in `kernels` and end

    def run(self, *kernels: Kernel) -> None:
        """Runs kernels one after another."""
        self.kernels += kernels
        self._now += Cost(kernels).estimated_seconds

    def start(self, name: str, *kernels: Kernel) -> None:
        """Starts transfers that `end` waits for."""
        self.running[name] = []
        for kernel in kernels:
            own = kernel.bytes_moved / self._bandwidth + start_seconds(kernel.kind) + LAUNCH_SECONDS
            beside = max(kernel.estimated_seconds - own, 0.0)
            self.run(dataclasses.replace(kernel, estimated_seconds=own))
            end = max(self._now, self._free[kernel.kind]) + beside
            self._free[kernel.kind] = end
            self.running[name].append((len(self.kernels) - 1, end))

    def end(self, name: str) -> None:
        """Waits for the transfers that were started under this name, if any."""
        for place, end in self.running.pop(name, ()):
            kernel, wait = self.kernels[place], max(end - self._now, 0.0)
            seconds = kernel.estimated_seconds + wait
            self.kernels[place] = dataclasses.replace(kernel, estimated_seconds=seconds)
            self._now += wait


class _Cache:
    """Knows which arrays of one computation are in the L2 cache."""

    def __init__(self, size: int):
        self._size = size
        self._arrays: dict[tuple[str, int], int] = {}  # the last array is the last touched

    def touch(self, arrays: dict[tuple[str, int], int]) -> int:
        """Returns how many bytes of these arrays are there. Then all of them are."""
        touched, here = 0, 0
        for name, size in reversed(self._arrays.items()):
            touched += size
            if touched > self._size:
                break
            here += min(size, arrays.get(name, 0))
        for name, size in arrays.items():
            self._arrays.pop(name, None)
            self._arrays[name] = size
        return here


class _Counter:
    """Walks through a program in the order in which it runs."""

    def __init__(self, program: Program, device: Device, link_bandwidth: float | None):
        self.program = program
        self.device = device
        self.link_bandwidth = link_bandwidth
        self.notes: dict[str, None] = {}  # an ordered set
        self.uncounted: dict[str, None] = {}  # names of kernels whose arithmetic is not counted

    def kernels(self, name: str) -> list[Kernel]:
        """Returns the kernels of a computation, with those of the computations that it calls."""
        computation = self.program.computations[name]
        transfers = _Transfers(self.device.reached_bandwidth)
        cache = _Cache(self.device.cache_bytes)
        for instruction in computation.instructions.values():
            if instruction.opcode in _FREE or '"AllocateBuffer"' in instruction.attributes:
                continue
            if instruction.opcode.endswith("-done"):
                transfers.end(instruction.operands[0])
                continue
            kernels = tuple(self._kernels(computation, instruction, cache))
            starts = instruction.opcode.endswith("-start")
            if starts and all(kernel.link_bytes or kernel.host_bytes for kernel in kernels):
                transfers.start(instruction.name, *kernels)
            else:
                transfers.run(*kernels)
        for started in tuple(transfers.running):  # the computation does not end them itself
            transfers.end(started)
        return transfers.kernels

    def _kernels(
        self, computation: Computation, instruction: Instruction, cache: _Cache
    ) -> Iterator[Kernel]:
        if instruction.opcode == "while":
            yield from self._loop(instruction)
        elif instruction.opcode == "conditional":
            branches = map(self.kernels, instruction.calls)
            yield from max(branches, key=lambda branch: Cost(tuple(branch)).estimated_seconds)
            self.notes["each conditional counts as its slowest branch"] = None
        elif instruction.opcode in ("call", "async-start"):
            for name in instruction.calls:
                yield from self.kernels(name)
        else:
            yield self._kernel(computation, instruction, cache)

    def _loop(self, loop: Instruction) -> Iterator[Kernel]:
        # If the trip count is known, XLA does not run the condition.
        parts = [loop.attribute("body")]
        if (count := loop.trip_count) is None:
            self.notes[
                f"how often {loop.name} ({loop.op_name}) runs is unknown: it counts once"
            ] = None
            parts.append(loop.attribute("condition"))
        for name in parts:
            for kernel in self.kernels(name):
                yield dataclasses.replace(kernel, count=kernel.count * (count or 1))

    def _kernel(self, computation: Computation, instruction: Instruction, cache: _Cache) -> Kernel:
        operands = [computation.instructions[name].shapes for name in instruction.operands]
        results = result_shapes(computation, instruction)
        arrays = bytes_read(self.program, computation, instruction)
        read = sum(arrays.values())
        written = bytes_written(self.program, computation, instruction)
        cached = cache.touch({_element(computation, name): n for name, n in arrays.items()})
        cache.touch({(instruction.name, i): one.bytes for i, one in enumerate(results)})
        sent = link_bytes(instruction, sum(operands, ()), results)
        to_host = any(shape.on_host for shape in results)
        # The kernel puts a slice into an array in the host's memory, or takes one out.
        on_host = written if to_host or any(shape.on_host for shape in sum(operands, ())) else 0
        if to_host:
            written = 0
        else:
            read -= min(read, on_host)
        matrix_flops, dtype = flops(self.program, computation, instruction)
        kind = "copy" if on_host else _kind(instruction, matrix_flops)
        moved, device = read + written, self.device
        is_vector = kind in VECTOR_KINDS
        work = instructions(self.program, computation, instruction) if is_vector else 0.0
        seconds = vector_seconds(device, kind, moved, cached, work)
        if kind == "attention":
            seconds = attention_seconds(device, instruction, matrix_flops, dtype, read, written)
        elif kind == "convolution":
            shapes = *(one[0] for one in operands[:2]), results[0]
            products = convolution_seconds(device, instruction, shapes, matrix_flops, dtype)
            seconds = max(seconds, products)
        elif matrix_flops:
            seconds = max(seconds, product_seconds(device, matrix_flops, dtype))
        if on_host:
            seconds = max(seconds, on_host / device.host_bandwidth + start_seconds(kind))
            self.notes[
                f"arrays move to and from the host's memory over PCIe at "
                f"{device.host_bandwidth / 1e9:.0f} GB/s"
            ] = None
        if sent and self.link_bandwidth:
            seconds = max(seconds, sent / self.link_bandwidth + start_seconds(kind))
        elif sent:
            self.notes["time on the links between devices is left out"] = None
        if not matrix_flops:
            self.uncounted |= dict.fromkeys(_uncounted(instruction))
        return Kernel(
            name=instruction.name,
            opcode=instruction.opcode,
            op_name=instruction.op_name,
            source=instruction.source,
            kind=kind,
            bytes_read=read,
            bytes_written=written,
            link_bytes=sent,
            flops=matrix_flops,
            dtype=dtype,
            count=1,
            estimated_seconds=seconds + LAUNCH_SECONDS,
            host_bytes=on_host,
        )


def _uncounted(instruction: Instruction) -> Iterator[str]:
    """Names the arithmetic of a kernel that may take longer than its memory traffic."""
    if instruction.opcode == "custom-call":
        yield instruction.attribute("custom_call_target")
    if any(i.opcode == "sort" for i in (instruction, *instruction.inner)):
        yield "sort"


def _kind(instruction: Instruction, matrix_flops: int) -> str:
    target = instruction.attribute("custom_call_target")
    if instruction.is_collective:
        return "collective"
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return "convolution"
    if matrix_flops:
        return "matrix product"
    names = {"copy": "copy", "copy-start": "copy", "custom-call": "custom call"}
    return names.get(instruction.opcode) or vector_kind(instruction)


def _element(computation: Computation, name: str) -> tuple[str, int]:
    """Returns the instruction that makes an array, and which of its results the array is."""
    instruction = computation.instructions[name]
    if instruction.opcode == "get-tuple-element":
        return instruction.operands[0], instruction.index
    return name, 0


def cost(
    program: Program | jax.stages.Compiled | str,
    device: Device,
    *,
    link_bandwidth: float | None = None,
) -> Cost:
    """Counts what a compiled program moves and computes on one device, and estimates its time.

    Args:
      program: a program compiled for a GPU, its HLO text, or the parsed text.
      device: the GPU that it was compiled for, from `lm.memory.get_device`.
      link_bandwidth: bytes a second that a device sends to others. If None, a collective takes the
        time to read and write its memory.

    Returns:
      The kernels and their totals. All times are estimates.

    Raises:
      ValueError: the text is not an HLO program.
      TypeError: the device is no GPU.
    """
    if not isinstance(device, Device):
        raise TypeError(f"cost: device: expected a GPU of lm.memory.get_device, got {device!r}")
    if isinstance(program, jax.stages.Compiled):
        program = program.as_text() or ""
    if isinstance(program, str):
        program = hlo.parse(program)
    counter = _Counter(program, device, link_bandwidth)
    kernels = tuple(counter.kernels(program.entry.name))
    notes = tuple(counter.notes)
    if counter.uncounted:
        notes += (
            f"the arithmetic of {', '.join(counter.uncounted)} is left out: the estimated time of "
            f"these kernels counts only their memory traffic and may be too short",
        )
    return Cost(kernels, notes)
