"""The two errors that the command line turns into one line and an exit code."""


class RequestError(ValueError):
    """The request itself is wrong (exit code 2): says what, where, why and what to do instead."""


class Refused(RuntimeError):
    """The request is sound but cannot be run here (exit code 3); carries the reason."""
