"""`lowmembp devices`: lists the GPUs that the planner knows."""

import dataclasses

from lowmembp_jax.cli._output import print_report


@dataclasses.dataclass(frozen=True)
class DevicesCommand:
    """List the GPUs that the planner knows."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.devices import DEVICES, get_device
        from lowmembp_jax.memory.report import devices_report

        print_report(devices_report(map(get_device, DEVICES)))
        return 0
