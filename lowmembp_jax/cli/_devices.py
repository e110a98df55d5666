"""`lowmembp devices`: lists the GPUs that the planner knows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DevicesCommand:
    """List the GPUs that the planner knows."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.devices import DEVICES, get_device
        from lowmembp_jax.memory.report import aligned
        from lowmembp_jax.memory.sizes import format_bytes

        head = ("name", "GPU", "memory", "usable at 0.75", "bandwidth")
        head += ("bf16 or f16", "tf32", "products measured by")
        rows = []
        for device in map(get_device, DEVICES):
            rates = device.matrix_flops
            half, tf32 = rates.get("bf16", rates.get("f16", 0)), rates.get("f32")
            rows.append((
                device.name,
                device.description,
                format_bytes(device.memory_bytes),
                format_bytes(device.usable_bytes()),
                f"{device.bandwidth / 1e9:,.0f} GB/s",
                f"{half / 1e12:,.0f} TFLOP/s",
                "" if tf32 is None else f"{tf32 / 1e12:,.0f} TFLOP/s",
                device.calibration.products_source,
            ))  # fmt: skip
        print("\n".join(aligned(head, *rows, left=("name", "GPU", head[-1]))))
        return 0
