"""The one error that bad input raises. Its text is a sentence a person can act on."""


class InputError(ValueError):
    """The caller asked for something that cannot be done.

    ``field`` names the offending parameter where there is one, so that an HTTP layer can say it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(InputError):
    """The engine holds as many unfinished requests as it may. Trying again later can succeed."""
