"""What the trainer raises."""


class UsageError(ValueError):
    """An argument has a value that does not work; the message names it."""


class DivergedError(Exception):
    """The loss is not a number any more; the message says since when."""
