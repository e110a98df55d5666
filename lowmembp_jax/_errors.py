"""Errors about the user's input, which a command shows in one line."""


class GivenError(ValueError):
    """An input is wrong; the message names it and says what was expected."""


class GivenTypeError(GivenError, TypeError):
    """An input has a wrong type."""
