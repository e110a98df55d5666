"""`lowmembp diff`: shows what grew between two plans."""

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class DiffCommand:
    """Show what grew and what shrank between two plans, by part and by module."""

    before: tyro.conf.Positional[Path]
    """A file that `lowmembp plan --json` wrote."""
    after: tyro.conf.Positional[Path]
    """A second file."""
    method: str | None = None
    """The method to compare, if the files have several."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.difference import describe, read_plan

        before, after = (read_plan(path, self.method) for path in (self.before, self.after))
        print(f"{self.before} and {self.after}\n{describe(before, after)}")
        return 0
