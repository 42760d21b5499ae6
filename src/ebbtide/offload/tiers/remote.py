"""What the remote tiers share: the line to a server, which may be down, and the settings in a URL."""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qsl

from ebbtide.errors import InputError
from ebbtide.offload.tiers.breaker import Breaker, BreakerConfig, State, Ticket

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Down:
    """The server was not asked, or did not answer. why: for people."""

    why: str


class Line:
    """The way to one server. Thread-safe. It says in the log when the server goes and comes back."""

    def __init__(
        self,
        server: str,
        errors: tuple[type[Exception], ...],
        config: BreakerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        describe: Callable[[Exception], str] | None = None,
    ) -> None:
        """``server``: its name in messages. ``errors``: what says that it did not answer; ``describe`` puts
        them in one line."""
        self._server = server
        self._errors = errors
        self._clock = clock
        self._describe = describe or one_line
        self._changed = threading.Condition()  # and the lock of all that follows
        self._breaker = Breaker(config)
        self._why = ""
        self._under_way = 0
        self._closed = False

    def ask(self, question: Callable[[], T]) -> T | Down:
        """What the server answers to ``question``. Down at once where it is known to be."""
        ticket = self._enter()
        if isinstance(ticket, Down):
            return ticket
        try:
            answer = question()
        except self._errors as error:
            return self._failed(ticket, self._describe(error))
        else:
            self._succeeded(ticket)
            return answer
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def trip(self, why: str) -> None:
        """Take it for down, before anyone asked."""
        with self._changed:
            self._why = why
            self._breaker.trip(self._clock())

    def state(self) -> str:
        """As in ``TierStats.state``."""
        with self._changed:
            if self._closed:
                return "down: it was closed"
            return "up" if self._breaker.state is State.CLOSED else f"down: {self._why}"

    def close(self) -> None:
        """Answer Down from now on, and wait for the questions under way: they have time limits."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._under_way == 0)

    def _enter(self) -> Ticket | Down:
        with self._changed:
            if self._closed:
                return Down(f"{self._server} was closed")
            ticket = self._breaker.admit(self._clock())
            if ticket is None:
                return Down(f"{self._server} is down: {self._why}")
            self._under_way += 1
            return ticket

    def _succeeded(self, ticket: Ticket) -> None:
        with self._changed:
            was = self._breaker.state
            self._breaker.succeeded(ticket, self._clock())
            back = was is not State.CLOSED and self._breaker.state is State.CLOSED
        if back:
            log.warning("%s answers again", self._server)

    def _failed(self, ticket: Ticket, why: str) -> Down:
        with self._changed:
            was = self._breaker.state
            self._why = why
            self._breaker.failed(ticket, self._clock())
            gone = was is State.CLOSED and self._breaker.state is State.OPEN
        if gone:
            log.warning("%s is down, and left alone until it answers: %s", self._server, why)
        return Down(f"{self._server}: {why}")


class RisingTotal:
    """The total of a counter of somebody else's, which starts again from 0 when they do."""

    def __init__(self) -> None:
        self.total = 0
        self._last = 0
        self._lock = threading.Lock()

    def read(self, count: int) -> int:
        """The counter stands at ``count`` now."""
        with self._lock:
            self.total += count - self._last if count >= self._last else count
            self._last = count
            return self.total


def one_line(error: Exception) -> str:
    """The first line of what a client says: some add pages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def settings(query: str, known: Mapping[str, Callable[[str], object]]) -> dict[str, object]:
    """The settings in a URL's query, each read by its function, which raises ValueError with a reason.

    Raises InputError for one that is unknown, given twice, or not to be read.
    """
    found: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"the URL has an unknown setting {name!r}: {hint}")
        if name in found:
            raise InputError(f"the URL has the setting {name!r} twice")
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise InputError(f"the URL's {name}={text!r} is no good: {error}") from None
    return found


def seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 3600:
        raise ValueError("give seconds, more than 0 and up to 3600")
    return value


def count(text: str) -> int:
    value = _number(text)
    if value != int(value) or not 0 <= value <= 2**31:
        raise ValueError("give a whole number, 0 or more")
    return int(value)


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("give true or false")
    return text.lower() == "true"


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("give a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("give a number")
    return value
