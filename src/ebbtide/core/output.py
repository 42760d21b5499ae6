"""What the scheduler tells: outputs for the requests' owners, and totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST, Cause, Source
from ebbtide.core.plan import TokenLogprob
from ebbtide.core.request import FinishReason


class Report(NamedTuple):
    """A finished request's token counts; the sources sum to ``prompt_tokens`` once it has output."""

    prompt_tokens: int
    output_tokens: int
    sources: dict[Source, int]
    recomputed: dict[Cause, int]


class Output(NamedTuple):
    """A token, the request's end, or both. A request ends exactly once."""

    request_id: str
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    message: str = ""
    report: Report | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the start; none of them ever goes down."""

    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: dict[Source, int] = field(
        default_factory=lambda: dict.fromkeys((DEVICE, HOST, COMPUTED), 0)
    )
    recomputed_tokens: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
