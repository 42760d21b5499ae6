"""Errors that callers are to catch. Their text is a sentence that a person can act on."""


class InputError(ValueError):
    """The caller asked for something that cannot be done.

    ``field`` names the offending parameter where there is one, so that an HTTP layer can say it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(InputError):
    """The engine holds as many unfinished requests as it may. Trying again later can succeed."""


class EngineStopped(RuntimeError):
    """The engine was closed, or stopped because of a bug of ours: no request is answered any more."""
