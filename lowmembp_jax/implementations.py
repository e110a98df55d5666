"""Which implementation of an operator runs."""

from typing import Literal

Implementation = Literal["xla"]
IMPLEMENTATIONS: tuple[str, ...] = ("xla",)


def check_implementation(implementation: str | None) -> None:
    """Raises unless `implementation` is None (the default) or one this version has.

    Raises:
      ValueError: the implementation asked for does not exist here. It is never replaced by
        another one silently.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not available: "
            f"accepted are None and {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
