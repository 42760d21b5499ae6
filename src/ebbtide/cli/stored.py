"""What ``ebbtide kv`` does with the chunks of a tier: counts, verifies, chooses and removes them.

A tier may hold millions: nothing here keeps its chunks in memory.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from ebbtide.errors import InputError
from ebbtide.offload.tiers import registry
from ebbtide.offload.tiers.base import Entry, Inventory, Result, Status, TierContext

NO_MODEL = TierContext(bytes(32), mmap.PAGESIZE)  # chunks of every model are looked at
CHECKS = 8  # at once: most of the time is a remote tier's answer
CHECKED_TOGETHER = 16 * CHECKS
REMOVED_TOGETHER = 1000
PROBLEMS_MAX = 1000  # that are kept for the report; all are counted
Lister = Callable[[], Iterable[Entry]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """An open tier. label: its URL as people may see it, or its directory."""

    label: str
    inventory: Inventory


@dataclass(slots=True)
class Amount:
    """Of chunks. oldest, newest: last uses, in seconds of the epoch; None where the tier does not know."""

    chunks: int = 0
    bytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, entry: Entry) -> None:
        self.chunks += 1
        self.bytes += entry.bytes
        at = entry.used_at
        if at is not None:
            self.oldest = at if self.oldest is None else min(at, self.oldest)
            self.newest = at if self.newest is None else max(at, self.newest)


@dataclass(slots=True)
class Survey:
    total: Amount = field(default_factory=Amount)
    namespaces: dict[bytes, Amount] = field(default_factory=dict)


@dataclass(slots=True)
class Removal:
    """failed: chunks that could not be removed; why: the first of them."""

    removed: Amount = field(default_factory=Amount)
    failed: int = 0
    why: str = ""


@dataclass(slots=True)
class Verification:
    intact: Amount = field(default_factory=Amount)
    corrupt: int = 0
    failed: int = 0  # could not be read: nobody knows whether they are good
    removed: int = 0
    problems: list[tuple[Entry, Result]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.corrupt + self.failed


@dataclass(frozen=True, slots=True)
class Rule:
    """What is to go: chunks that meet all that is said; with ``to_bytes``, the oldest of them, until the
    tier holds no more than that. namespace: the beginning of its hexadecimal digits."""

    namespace: str = ""
    used_before: float | None = None
    to_bytes: int | None = None

    def allows(self, entry: Entry) -> bool:
        if not entry.namespace.hex().startswith(self.namespace):
            return False
        return self.used_before is None or (
            entry.used_at is not None and entry.used_at < self.used_before
        )


@contextmanager
def opened(urls: Sequence[str]) -> Iterator[list[Place]]:
    """Raises InputError where a tier cannot be opened, or has no list of what it holds."""
    with ExitStack() as stack:
        yield [_open(url, stack) for url in urls]


def survey(entries: Iterable[Entry]) -> Survey:
    found = Survey()
    for entry in entries:
        found.total.add(entry)
        found.namespaces.setdefault(entry.namespace, Amount()).add(entry)
    return found


def verify(inventory: Inventory, entries: Iterable[Entry], remove: bool) -> Verification:
    """Check all chunks, several at once; ``remove`` those that are corrupt. What has gone meanwhile is
    counted nowhere."""
    told = Verification()
    with ThreadPoolExecutor(CHECKS, "kv-check") as pool:
        for batch in _batches(entries, CHECKED_TOGETHER):
            for entry, result in zip(batch, pool.map(inventory.check, batch), strict=True):
                if result.status is Status.OK:
                    told.intact.add(entry)
                elif result.status is not Status.MISSING:
                    _note(told, inventory, entry, result, remove)
    return told


def chosen(list_entries: Lister, rule: Rule) -> Iterator[Entry]:
    """The chunks that a rule chooses. For ``to_bytes`` they are listed twice, and ages count in seconds."""
    excess, last, rest = math.inf, math.inf, math.inf
    if rule.to_bytes is not None:
        total, ages = 0, Counter[float]()
        for entry in list_entries():
            total += entry.bytes
            if rule.allows(entry):
                ages[_second(entry)] += entry.bytes
        excess = total - rule.to_bytes
        last, rest = _last_to_go(ages, excess)
    if excess <= 0:
        return
    for entry in filter(rule.allows, list_entries()):
        second = _second(entry)
        if second < last:
            yield entry
        elif second == last and rest > 0:
            rest -= entry.bytes
            yield entry


def remove(inventory: Inventory, entries: Iterable[Entry]) -> Removal:
    told = Removal()
    for batch in _batches(entries, REMOVED_TOGETHER):
        for entry, result in zip(batch, inventory.remove(batch), strict=True):
            if result.status is Status.OK:
                told.removed.add(entry)
            else:
                told.failed += 1
                told.why = told.why or result.message or result.status.value
    return told


def _last_to_go(ages: Counter[float], excess: int) -> tuple[float, int]:
    """The last second of which chunks are to go, and how many bytes of that one."""
    left = excess
    for second in sorted(ages):
        if ages[second] >= left:
            return second, left
        left -= ages[second]
    return math.inf, excess  # all that may go do not suffice


def _second(entry: Entry) -> float:
    """Of its last use. What a tier does not know the age of goes last."""
    return math.inf if entry.used_at is None else math.floor(entry.used_at)


def _note(
    told: Verification, inventory: Inventory, entry: Entry, result: Result, remove: bool
) -> None:
    if result.status is Status.CORRUPT:
        told.corrupt += 1
        if remove:
            (removed,) = inventory.remove([entry])
            told.removed += removed.status is Status.OK
    else:
        told.failed += 1
    if len(told.problems) < PROBLEMS_MAX:
        told.problems.append((entry, result))


def _open(url: str, stack: ExitStack) -> Place:
    parts = urlsplit(url)
    path = unquote(parts.path)
    url, _ = registry.take_setting(url, "write")
    if parts.scheme == "file":  # a file tier itself would begin to keep its directory in order
        from ebbtide.offload.tiers.file_inventory import open_inventory

        inventory = open_inventory(url)
        stack.callback(inventory.close)
        return Place(path, inventory)
    if parts.scheme == "object+file":
        from pathlib import Path

        if not Path(path).is_dir():  # the tier would make it
            raise InputError(f"there is no directory {path}")
    label = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    tier = registry.open_tier(url, NO_MODEL)
    stack.callback(tier.close)
    if not isinstance(tier, Inventory):
        raise InputError(f"what is stored in {label} cannot be listed: its tier has no way to")
    return Place(label, tier)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
