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


def readable_bytes(size: int) -> str:
    """A size for a message: 900 TiB, 1.5 GiB, 0.7 KiB are read at a glance; 943718400 MiB is not."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(0, (size.bit_length() - 1) // 10), len(units) - 1)
    value = size / (1 << 10 * power)
    return (
        f"{value:.0f} {units[power]}"
        if value >= 100 or not power
        else f"{value:.3g} {units[power]}"
    )
