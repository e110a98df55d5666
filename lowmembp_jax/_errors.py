"""Errors of what was given, which a command shows in one line."""


class GivenError(ValueError):
    """What was given does not work; the message names it and says what is accepted."""
