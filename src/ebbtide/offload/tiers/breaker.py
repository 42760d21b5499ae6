"""A circuit breaker: stops asking a server that does not answer, and finds out when it does again.

            failures_max in a row              wait is over: one call goes through
    CLOSED ----------------------> OPEN ------------------------------------> HALF_OPEN
      ^                             ^                                          |     |
      |                             +------------ it failed: wait longer ------+     |
      +---------------------------------- it succeeded ------------------------------+

Each wait is twice the one before, up to ``wait_s_max``, until it was closed for that long. Pure logic: the
time is an argument, and whoever uses it from several threads holds a lock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


LEGAL = {
    State.CLOSED: {State.OPEN},
    State.OPEN: {State.HALF_OPEN},
    State.HALF_OPEN: {State.CLOSED, State.OPEN, State.HALF_OPEN},  # to itself: the call got lost
}

Ticket = NewType("Ticket", int)
"""What a call was admitted with. It is of one spell of a state: what is told of it later is ignored."""


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    failures_max: int = 3  # in a row, after which it opens
    wait_s: float = 0.25  # until the first try
    wait_s_max: float = 30.0
    probe_s: float = 10.0  # a try that has not returned by then is taken for lost

    def __post_init__(self) -> None:
        assert self.failures_max > 0
        assert self.probe_s > 0
        assert 0 < self.wait_s <= self.wait_s_max


class Breaker:
    def __init__(self, config: BreakerConfig | None = None) -> None:
        self.config = config or BreakerConfig()
        self.state = State.CLOSED
        self._spell = 0
        self._failures = 0  # in a row, in this spell of CLOSED
        self._closed_at = float("-inf")
        self._wait_s = 0.0  # the last one; 0 where none is remembered
        self._until = 0.0  # OPEN: end of the wait. HALF_OPEN: when its call is taken for lost

    def admit(self, now: float) -> Ticket | None:
        """A ticket for one call, or None: do not ask. What became of the call is to be told."""
        if self.state is not State.CLOSED:
            if now < self._until:
                return None
            self._move(State.HALF_OPEN)
            self._until = now + self.config.probe_s
        return Ticket(self._spell)

    def succeeded(self, ticket: Ticket, now: float) -> None:
        if ticket != self._spell:
            return
        self._failures = 0
        if self.state is State.HALF_OPEN:
            self._move(State.CLOSED)
            self._closed_at = now

    def failed(self, ticket: Ticket, now: float) -> None:
        if ticket != self._spell:
            return
        self._failures += 1
        if self.state is State.HALF_OPEN or self._failures >= self.config.failures_max:
            self._open(now)

    def trip(self, now: float) -> None:
        """Open now, whatever came before: for a server that was not there at the start."""
        if self.state is State.CLOSED:
            self._open(now)

    def _open(self, now: float) -> None:
        if self.state is State.CLOSED and now - self._closed_at >= self.config.wait_s_max:
            self._wait_s = 0.0  # it was well for long enough
        self._wait_s = min(max(self.config.wait_s, 2 * self._wait_s), self.config.wait_s_max)
        self._until = now + self._wait_s
        self._move(State.OPEN)

    def _move(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.state} to {state}"
        self.state = state
        self._spell += 1
        self._failures = 0
