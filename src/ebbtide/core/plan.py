"""What crosses the line between the scheduler and whoever runs a step: plans, outcomes, transfers.

The scheduler and the executor share nothing but these values. A plan stays true while it is in
flight: the lists that it refers to (tokens, block tables) only ever grow at their end, and a plan
says how much of them it means.

    plan    = scheduler.schedule(now)
    future  = executor.submit(plan)            # plans run in order
    outputs = scheduler.apply(plan, future.result())
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ebbtide.params import SamplingParams


class Table(NamedTuple):
    """Block table of one KV group: ``blocks[i]`` holds the positions of block index ``first + i``.

    ``first`` is above 0 where a sliding window has released what no later position can see.
    """

    first: int
    blocks: list[int]


class Row(NamedTuple):
    """One request's share of a step: feed positions [start, end), maybe sample position ``end``.

    Of ``tokens`` (prompt, then output) only the first ``known`` belong to this plan. Where
    ``end == known + 1``, the last token to feed is the one that the preceding step samples for the
    same request: the executor knows it, the scheduler does not yet.
    """

    request_id: str
    tokens: list[int]
    known: int
    start: int
    end: int
    tables: tuple[Table, ...]
    sampling: SamplingParams | None  # None: nothing to sample, the prompt is not all fed yet
    output_index: int  # of the token to sample: 0 is the first output token

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens. Meaningful in rows that sample."""
        return self.end - self.output_index


class Direction(enum.Enum):
    LOAD = "load"  # host slot -> device blocks, maybe tier -> host slot before
    STORE = "store"  # device blocks -> host slot


class Transfer(NamedTuple):
    """Move consecutive blocks of one chunk. ``blocks[i]`` is block number ``offset + i`` of the chunk.

    ``tier``: where the chunk is to be read from first, into the slot; empty where the slot has it.
    ``slot``: NO_SLOT where a chunk that is read finds no room in the host tier.
    """

    id: int
    direction: Direction
    key: bytes
    slot: int
    offset: int
    blocks: tuple[int, ...]
    tier: str = ""


NO_SLOT = -1


class TransferResult(NamedTuple):
    """How a transfer ended. ``error`` is empty where it succeeded.

    ``seconds``: that the tier took to read the chunk; 0 where it was not measured. ``tried``: False for a
    load that was called back before it began, since nobody waited for it any more.
    """

    transfer: Transfer
    error: str = ""
    seconds: float = 0.0
    tried: bool = True


class TokenLogprob(NamedTuple):
    """Natural-log probability of the sampled token, and the best alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. ``loads`` must be done before its compute; most steps have none."""

    step: int
    rows: Sequence[Row]
    loads: Sequence[Transfer]
    num_tokens: int  # positions fed, summed over the rows


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought.

    tokens: one per row that samples, in the plan's order.
    logprobs: row index -> log-probabilities, for the rows that asked.
    invalid_blocks: blocks whose content turned out bad (a failed load, a checksum, the device).
    error: set when the step as a whole failed; then nothing else in here counts.
    seconds: that it took; 0 where it was not measured.
    """

    tokens: Sequence[int] = ()
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    invalid_blocks: frozenset[int] = frozenset()
    error: BaseException | None = None
    seconds: float = 0.0


class StepFuture(Protocol):
    """What ``submit`` returns: a ``concurrent.futures.Future`` does."""

    def result(self) -> StepOutcome: ...
    def done(self) -> bool: ...


class Executor(Protocol):
    """Runs plans in the order they were submitted. A failed step is an outcome, never an exception."""

    def submit(self, plan: StepPlan) -> StepFuture: ...
    def close(self) -> None: ...
