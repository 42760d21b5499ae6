"""The HTTP server's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.errors import InputError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ``InputError`` for values that cannot work.

    body_bytes_max: larger request bodies are refused (413).
    body_timeout_s: how long a client may take to send its body (408).
    grace_s: how long requests in flight may go on once the server is told to stop.
    """

    body_bytes_max: int = 16 * MIB
    body_timeout_s: float = 60.0
    grace_s: float = 3.0

    def __post_init__(self) -> None:
        if self.body_bytes_max < 1:
            raise InputError(f"body_bytes_max must be at least 1, got {self.body_bytes_max}")
        if self.body_timeout_s <= 0:
            raise InputError(f"body_timeout_s must be above 0, got {self.body_timeout_s}")
        if self.grace_s < 0:
            raise InputError(f"grace_s must be at least 0, got {self.grace_s}")
