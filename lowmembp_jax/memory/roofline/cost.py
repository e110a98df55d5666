"""What a compiled program moves and computes, kernel by kernel, and an estimate of its time.

The numbers come from the program's own instructions, without a GPU. `_traffic.py` counts bytes and
`_flops.py` counts FLOPs. A kernel takes as long as its bytes or its FLOPs, whichever is longer (the
roofline model, Williams et al. 2009), at the measured rates in `calibration.py`. One kernel runs
after another. A transfer between devices, or to the host's memory, runs beside the kernels that XLA
schedules between its start and its end. These kernels lose the time that the transfer's bytes take
in the device's own memory. Transfers of one kind run one after another.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import jax

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program, Shape
from lowmembp_jax.memory.roofline._flops import flops
from lowmembp_jax.memory.roofline._traffic import bytes_moved, result_shapes
from lowmembp_jax.memory.roofline.collectives import is_collective, link_bytes
from lowmembp_jax.memory.roofline.totals import Cost as Cost
from lowmembp_jax.memory.roofline.totals import Kernel as Kernel

#: Seconds from the end of one kernel to the start of the next: about what a CUDA stream takes.
LAUNCH_SECONDS = 2e-6

# Instructions that launch nothing.
_FREE = {
    "add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element",
    "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip


class _Transfers:
    """Transfers that run beside the kernels of one computation, which are collected here."""

    def __init__(self, bandwidth: float):
        self.kernels: list[Kernel] = []
        self._bandwidth = bandwidth  # of the device's own memory
        self._now = 0.0
        self._free: dict[str, float] = defaultdict(float)  # when the last of a kind ends
        self._running: dict[str, list[tuple[int, float]]] = {}  # places in `kernels`, and ends

    def run(self, *kernels: Kernel) -> None:
        """One after another."""
        self.kernels += kernels
        self._now += Cost(kernels).estimated_seconds

    def start(self, name: str, *kernels: Kernel) -> None:
        """Transfers that `end` waits for."""
        self._running[name] = []
        for kernel in kernels:
            own = kernel.bytes_moved / self._bandwidth + LAUNCH_SECONDS
            beside = max(kernel.estimated_seconds - own, 0.0)
            self.run(dataclasses.replace(kernel, estimated_seconds=own))
            end = max(self._now, self._free[kernel.kind]) + beside
            self._free[kernel.kind] = end
            self._running[name].append((len(self.kernels) - 1, end))

    def end(self, name: str) -> None:
        """Waits for what was started under this name, if anything was."""
        for place, end in self._running.pop(name, ()):
            kernel, wait = self.kernels[place], max(end - self._now, 0.0)
            seconds = kernel.estimated_seconds + wait
            self.kernels[place] = dataclasses.replace(kernel, estimated_seconds=seconds)
            self._now += wait

    def end_all(self) -> None:
        """Waits for what this computation does not wait for itself."""
        for name in tuple(self._running):
            self.end(name)


class _Counter:
    """Walks a program as it runs."""

    def __init__(self, program: Program, device: Device, link_bandwidth: float | None):
        self.program = program
        self.device = device
        self.link_bandwidth = link_bandwidth
        self.notes: dict[str, None] = {}  # ordered, once each
        self.uncounted: dict[str, None] = {}  # whose arithmetic is

    def kernels(self, computation: Computation) -> list[Kernel]:
        transfers = _Transfers(self.device.reached_bandwidth)
        for instruction in computation.instructions.values():
            if instruction.opcode in _FREE or _allocates(instruction):
                continue
            if instruction.opcode.endswith("-done"):
                transfers.end(instruction.operands[0])
                continue
            kernels = tuple(self._kernels(computation, instruction))
            starts = instruction.opcode.endswith("-start")
            if starts and all(kernel.link_bytes or kernel.host_bytes for kernel in kernels):
                transfers.start(instruction.name, *kernels)
            else:
                transfers.run(*kernels)
        transfers.end_all()
        return transfers.kernels

    def _kernels(self, computation: Computation, instruction: Instruction) -> Iterator[Kernel]:
        if instruction.opcode == "while":
            yield from self._loop(instruction)
        elif instruction.opcode == "conditional":
            branches = [self.kernels(self._called(name)) for name in instruction.calls]
            yield from max(branches, key=lambda branch: Cost(tuple(branch)).estimated_seconds)
            self.notes["of each conditional, the branch that takes longest is counted"] = None
        elif instruction.opcode in ("call", "async-start"):
            for name in instruction.calls:
                yield from self.kernels(self._called(name))
        else:
            yield self._kernel(computation, instruction)

    def _called(self, name: str) -> Computation:
        return self.program.computations[name]

    def _loop(self, loop: Instruction) -> Iterator[Kernel]:
        # With a known count XLA runs no condition.
        parts = [loop.attribute("body")]
        if (count := loop.trip_count) is None:
            self.notes[f"how often {loop.name} ({loop.op_name}) runs is unknown: counted once"] = (
                None
            )
            parts.append(loop.attribute("condition"))
        for name in parts:
            for kernel in self.kernels(self._called(name)):
                yield dataclasses.replace(kernel, count=kernel.count * (count or 1))

    def _kernel(self, computation: Computation, instruction: Instruction) -> Kernel:
        operands = [computation.instructions[name].shapes for name in instruction.operands]
        results = result_shapes(computation, instruction)
        read, written = bytes_moved(self.program, computation, instruction)
        sent = link_bytes(instruction, sum(operands, ()), results)
        to_host = any(shape.on_host for shape in results)
        # A slice that is put into an array of the host's, or taken out of one.
        on_host = written if to_host or any(shape.on_host for shape in sum(operands, ())) else 0
        if to_host:
            written = 0
        else:
            read -= min(read, on_host)
        matrix_flops, dtype = flops(self.program, computation, instruction)
        kind = "copy" if on_host else _kind(instruction, matrix_flops)
        seconds = (read + written) / self.device.reached_bandwidth
        if kind == "attention":
            head_size = operands[0][0].dims[-1]
            products = self.device.attention_seconds(matrix_flops, dtype, head_size)
        else:
            products = self.device.product_seconds(matrix_flops, dtype)
        seconds = max(seconds, products)
        if on_host:
            seconds = max(seconds, on_host / self.device.host_bandwidth)
            self.notes[
                f"arrays go to the host's memory and back, by PCIe at "
                f"{self.device.host_bandwidth / 1e9:.0f} GB/s"
            ] = None
        if sent and self.link_bandwidth:
            seconds = max(seconds, sent / self.link_bandwidth)
        elif sent:
            self.notes["time on the links between devices is left out"] = None
        if not matrix_flops:
            shapes = sum(operands, results)
            self.uncounted |= dict.fromkeys(self._uncounted(instruction, shapes))
        return Kernel(
            name=instruction.name,
            opcode=instruction.opcode,
            op_name=self.program.op_name(instruction),
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

    def _uncounted(self, instruction: Instruction, shapes: tuple[Shape, ...]) -> Iterator[str]:
        """Names of what a kernel computes that takes longer than its memory."""
        if instruction.opcode == "custom-call":
            yield instruction.attribute("custom_call_target")
        if any(i.opcode == "sort" for i in (instruction, *self.program.inner(instruction))):
            yield "sort"
        slow = self.device.matrix_flops.get("f64", 0.0) < self.device.vector_flops / 8
        copies = instruction.opcode in ("copy", "copy-start")
        if slow and not copies and any(shape.dtype in ("f64", "c128") for shape in shapes):
            yield "float64"


def _allocates(instruction: Instruction) -> bool:
    """Whether it only names memory, as of the host."""
    return instruction.attribute("custom_call_target") == "AllocateBuffer"


def _kind(instruction: Instruction, matrix_flops: int) -> str:
    target = instruction.attribute("custom_call_target")
    if is_collective(instruction.opcode):
        return "collective"
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return "convolution"
    if matrix_flops:
        return "matrix product"
    return {"copy": "copy", "copy-start": "copy", "custom-call": "custom call"}.get(
        instruction.opcode, "other"
    )


def cost(
    program: Program | jax.stages.Compiled | str,
    device: Device,
    *,
    link_bandwidth: float | None = None,
) -> Cost:
    """Counts what a compiled program moves and computes on one device, and estimates its time.

    Args:
      program: compiled for a GPU, its text, or that parsed.
      device: that it was compiled for, from `lm.memory.get_device`.
      link_bandwidth: bytes a second that a device sends to others; without it the time of
        collectives is that of reading and writing memory.

    Returns:
      The kernels and totals over them. All times are estimates.

    Raises:
      ValueError: the text is not a program of HLO.
    """
    if isinstance(program, jax.stages.Compiled):
        program = program.as_text() or ""
    if isinstance(program, str):
        program = hlo.parse(program)
    counter = _Counter(program, device, link_bandwidth)
    kernels = tuple(counter.kernels(program.entry))
    notes = tuple(counter.notes)
    if counter.uncounted:
        notes += (
            f"the arithmetic of {', '.join(counter.uncounted)} is left out: the time of such "
            f"kernels is that of their memory alone, and may be too short",
        )
    return Cost(kernels, notes)
