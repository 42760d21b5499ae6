"""A request: its tokens, its state, and how far its KV has come.

States and their transitions are below; ``Request.move`` is the one place that changes a state.

Positions of a running request::

    0            committed        scheduled      target
    |  KV is there  |  being written  |  not yet fed |
    tokens: prompt ............ | output ....... | one may still be being sampled

``target`` counts the tokens that exist or are being sampled by a step in flight. A row that ends at
``target`` samples the next one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ebbtide.core.ledger import Cause, Ledger, Span
from ebbtide.core.plan import Table
from ebbtide.keys import block_digest
from ebbtide.params import RepetitionDetector, SamplingParams


class State(enum.Enum):
    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds blocks that transfers are filling
    RUNNING = "running"
    DRAINING = "draining"  # gives up its blocks once no step in flight refers to it
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class Drain(enum.IntEnum):
    """Why a request drains, in order of precedence: what its steps in flight still bring."""

    NO = 0
    PREEMPTED = 1  # positions are committed, the token is taken
    ENDED = 2  # positions are committed, the token is dropped
    LOST = 3  # neither: its KV is bad


LEGAL = {
    State.WAITING: {State.LOADING, State.RUNNING, State.FINISHED},
    State.LOADING: {State.RUNNING, State.DRAINING},
    State.RUNNING: {State.DRAINING},
    State.DRAINING: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. ``length_max`` bounds prompt plus output, in tokens.

    ``root`` is the digest that its blocks' chain starts from. A request with a lower ``priority``
    is admitted first and preempted last, then the one that arrived first.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    length_max: int
    root: bytes
    priority: int
    arrival: int
    fail_on_lost_kv: bool
    prompt_length: int = field(init=False)
    repetition: RepetitionDetector | None = field(init=False)
    ledger: Ledger = field(init=False)
    digests: list[bytes] = field(default_factory=list)

    state: State = State.WAITING
    drain: Drain = Drain.NO
    finish: FinishReason | None = None
    cause: Cause = Cause.PREEMPTED  # of the next recomputation
    failed_steps: int = 0  # in a row: until it gets further than ever before
    losses: int = 0  # of KV, in a row
    in_flight: int = 0  # steps

    tables: tuple[Table, ...] = ()
    capacity: int = 0  # positions that the tables cover in every group
    committed: int = 0
    scheduled: int = 0
    target: int = 0
    published: int = 0  # blocks of this chain that were offered to the prefix index
    boundary: int = 0  # committed positions at which the next block is full
    spans: tuple[Span, ...] = ()  # matched positions, until they are known to be good
    settled: int = 0  # rows that start before it may say something new to the ledger
    loads: set[int] = field(default_factory=set)  # transfers that it waits for
    load_error: str = ""
    load_deadline: float = 0.0
    private: bool = False  # a reset came by: nothing of this admission is shared or stored

    def __post_init__(self) -> None:
        self.prompt_length = self.target = len(self.tokens)
        self.ledger = Ledger(self.prompt_length)
        rule = self.params.repetition
        self.repetition = RepetitionDetector(rule) if rule else None

    def move(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.id}: {self.state.name} -> {state.name}"
        self.state = state

    def forget_blocks(self) -> None:
        """It holds no block and has computed nothing, as when it arrived, but keeps its tokens."""
        self.tables = ()
        self.capacity = self.committed = self.scheduled = self.published = self.boundary = 0
        self.target = len(self.tokens)
        self.spans = ()
        self.load_error = ""
        self.private = False

    def note_reached(self) -> None:
        """It gives up KV: all that was committed, the output's too, may have to be computed again."""
        if not self.spans:
            self.ledger.reached = max(self.ledger.reached, self.committed)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served first."""
        return (self.priority, self.arrival)

    def digest_upto(self, count: int, block_size: int) -> list[bytes]:
        """The chain, at least ``count`` blocks of it; all their tokens must be known."""
        digests = self.digests
        while len(digests) < count:
            start = len(digests) * block_size
            block = self.tokens[start : start + block_size]
            assert len(block) == block_size, f"{self.id}: block {len(digests)} is not full"
            digests.append(block_digest(digests[-1] if digests else self.root, block))
        return digests

    def __repr__(self) -> str:
        positions = f"{self.committed} committed, {self.scheduled} scheduled, target {self.target}"
        return f"<Request {self.id} {self.state.name} {positions}, {self.in_flight} in flight>"
