"""Asks the tiers that take time for an answer what they have of a prompt, before it is matched.

Each tier has a thread. A request waits for their answers until its deadline, and then counts what has not
been answered as a miss; a tier that is behind with an answer is not waited for at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ebbtide.keys import block_digest, chunk_key, root_digest
from ebbtide.offload.tiers.base import Tier

log = logging.getLogger(__name__)

FIRST_KEYS = 32  # of a prompt that a tier is asked for: what comes of them is known soon
BATCH_KEYS_MAX = 256  # in one call, each of twice as many keys as the one before


@dataclass(slots=True)
class _Question:
    requests: tuple[str, ...]
    prompt: list[int]
    salt: str
    deadline: float
    waits_for: set[str] = field(default_factory=set)  # tiers


@dataclass(frozen=True, slots=True)
class Chunking:
    """What turns a prompt into the keys of its chunks."""

    namespace: bytes
    block_size: int
    blocks_per_chunk: int
    num_groups: int

    @property
    def chunk_tokens(self) -> int:
        return self.block_size * self.blocks_per_chunk

    def keys(self, prompt: Sequence[int], salt: str) -> Iterator[bytes]:
        """Of every full chunk, in the order of the prompt. One by one, since a long prompt takes a while."""
        digest = root_digest(self.namespace, {"salt": salt})
        size = self.block_size
        for index in range(len(prompt) // size):
            digest = block_digest(digest, prompt[index * size : (index + 1) * size])
            if (index + 1) % self.blocks_per_chunk == 0:
                for group in range(self.num_groups):
                    yield chunk_key(digest, group)


class Lookups:
    """``found`` is called on a tier's thread with its name and keys that it has; ``answered`` when a
    request's deadline need not be waited for, with the requests of the question."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        chunking: Chunking,
        deadline_s: float,
        found: Callable[[str, list[bytes]], None],
        answered: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._chunking = chunking
        self._deadline_s = deadline_s
        self._found = found
        self._answered = answered
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Question]] = {tier.name: deque() for tier in tiers}
        self._asked: dict[str, float] = {}  # tier -> the deadline of what it is being asked
        self._open: OrderedDict[tuple[str, ...], _Question] = OrderedDict()  # by their deadlines
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(tier,), name=f"ebbtide-lookup-{tier.name}", daemon=True
            )
            for tier in tiers
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, requests: Sequence[str], prompt: list[int], salt: str) -> bool:
        """Ask for the prompt of these requests. False where there is nothing to wait for."""
        if len(prompt) < self._chunking.chunk_tokens:
            return False
        now = time.monotonic()
        question = _Question(tuple(requests), prompt, salt, now + self._deadline_s)
        with self._changed:
            for name, queue in self._queues.items():
                oldest = self._asked.get(name) or (queue[0].deadline if queue else None)
                if oldest is None or oldest > now:
                    question.waits_for.add(name)
                    queue.append(question)
            if not question.waits_for or self._closing:
                return False
            self._open[question.requests] = question
            self._changed.notify_all()
        return True

    def next_deadline(self) -> float | None:
        with self._changed:
            return next((question.deadline for question in self._open.values()), None)

    def expired(self, now: float) -> list[str]:
        """The requests that have waited long enough; they are not ``answered`` any more."""
        late: list[str] = []
        with self._changed:
            while self._open and next(iter(self._open.values())).deadline <= now:
                requests, _ = self._open.popitem(last=False)
                late += requests
        return late

    def close(self, patience_s: float) -> None:
        """A tier that does not answer in time is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, tier: Tier) -> None:
        queue = self._queues[tier.name]
        while True:
            with self._changed:
                self._asked.pop(tier.name, None)
                while not queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                question = queue.popleft()
                self._asked[tier.name] = question.deadline
            self._look_up(tier, question)
            with self._changed:
                question.waits_for.discard(tier.name)
                is_open = self._open.get(question.requests) is question
                is_answered = is_open and not question.waits_for
                if is_answered:
                    del self._open[question.requests]
            if is_answered:
                self._answered(question.requests)

    def _look_up(self, tier: Tier, question: _Question) -> None:
        keys = self._chunking.keys(question.prompt, question.salt)
        count = FIRST_KEYS
        while time.monotonic() < question.deadline and not self._closing:
            part = list(islice(keys, count))
            count = min(2 * count, BATCH_KEYS_MAX)
            try:
                has = tier.lookup(part) if part else []
                found = [key for key, there in zip(part, has, strict=True) if there]
            except BaseException:  # a tier of somebody else's, whatever it raises
                log.exception("the lookup in the tier %s failed", tier.name)
                return
            if not found:
                return  # what lies behind is of no use, or not there either
            self._found(tier.name, found)
