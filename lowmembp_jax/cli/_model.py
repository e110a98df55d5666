"""The options that name a model."""

import dataclasses
import re
from typing import TYPE_CHECKING

from lowmembp_jax._errors import GivenError

if TYPE_CHECKING:
    from lowmembp_jax.cli._factories import Factory


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    model: str
    """A name such as llama-3-8b, qwen3-8b, gemma-2-9b or vit-b16; or the path/to/config.json of a
    Hugging Face model of these families, which is only read; or path/to/file.py:function, which
    runs the file. The function may take method, batch and --options. It returns a step and the
    tuple of its abstract arguments."""
    batch: int | None = None
    """Batch size on all devices together."""
    options: tuple[str, ...] = ()
    """More arguments of the model, such as tokens=2048."""

    def load(self) -> "Factory":
        from lowmembp_jax.cli._factories import load_factory

        if self.batch is not None and self.batch < 1:
            raise GivenError(f"--batch must be at least 1, got {self.batch}")
        return load_factory(self.model)

    def arguments(self) -> dict[str, int | str]:
        """The arguments of the factory, without method and batch."""
        given = named_values("--options", self.options)
        for key in {"batch", "method"}.intersection(given):
            raise GivenError(f"--options: {key} has its own option: use --{key}")
        return given


def named_values(option: str, given: tuple[str, ...]) -> dict[str, int | str]:
    """Parses the values of an option of the form name=value, by name.

    Raises:
      GivenError: a value has another form, or a name occurs twice.
    """
    found: dict[str, int | str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            raise GivenError(f"{option}: expected name=value, got {each!r}")
        if key in found:
            raise GivenError(f"{option}: {key} is given twice")
        found[key] = int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
    return found
