"""What `--model` and its companions name."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from lowmembp_jax._errors import GivenError

if TYPE_CHECKING:
    from lowmembp_jax.cli._factories import Factory


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    model: str
    """A name, such as llama-3-8b, qwen3-8b, gemma-2-9b or vit-b16; or path/to/config.json of a
    Hugging Face model of these families; or path/to/file.py:function, which is called with method,
    train, batch and --options, as it takes them, and returns a step and the tuple of its abstract
    arguments."""
    train: str | None = None
    """What is trained: full, lora-qv, lora-all, ... (of the examples' models)."""
    batch: int | None = None
    """Batch size, of all devices together."""
    options: tuple[str, ...] = ()
    """More arguments of the model, such as tokens=2048."""

    def load(self) -> "Factory":
        from lowmembp_jax.cli._factories import load_factory

        if self.batch is not None and self.batch < 1:
            raise GivenError(f"--batch must be at least 1, got {self.batch}")
        return load_factory(self.model)

    def arguments(self) -> dict[str, Any]:
        """What the factory is called with, apart from method and batch."""
        given = named_values("--options", self.options)
        for key in {"train", "batch", "method"}.intersection(given):
            raise GivenError(f"--options: {key} has an option --{key}")
        return {"train": self.train, **given}


def named_values(option: str, given: tuple[str, ...]) -> dict[str, int | str]:
    """What an option of the form name=value has, by name.

    Raises:
      GivenError: it has another form, or one name twice.
    """
    found: dict[str, int | str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            raise GivenError(f"{option} takes name=value, got {each!r}")
        if key in found:
            raise GivenError(f"{option}: {key} is given twice")
        found[key] = int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
    return found
