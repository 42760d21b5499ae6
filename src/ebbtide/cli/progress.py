"""Progress on the terminal, for what takes longer than a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from ebbtide.offload.tiers.base import Entry

UPDATED_EVERY = 64  # chunks: an update costs about as much as removing one


class Loading:
    """A progress bar that an engine's ``progress`` argument drives; gone once ``done``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading the model", total=1.0)

    def __call__(self, what: str, fraction: float) -> None:
        self._progress.update(self._task, description=what, completed=fraction)

    def done(self) -> None:
        self._progress.stop()


@contextmanager
def loading() -> Iterator[Loading]:
    """On stderr, so that what a command prints stays clean; silent where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield Loading(progress)


class Tracking:
    """Progress over the chunks of a tier. is_shown: whether anybody sees it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.is_shown = not progress.disable

    def track(self, entries: Iterable[Entry], what: str, bytes: int = 0) -> Iterable[Entry]:
        """Hand them out, and count. bytes: of all of them; 0 where that is not known."""
        return self._track(entries, what, bytes) if self.is_shown else entries

    def _track(self, entries: Iterable[Entry], what: str, bytes: int) -> Iterator[Entry]:
        task = self._progress.add_task(what, total=bytes or None, chunks=0)
        done = 0
        for number, entry in enumerate(entries, 1):
            yield entry
            done += entry.bytes
            if number % UPDATED_EVERY == 0:
                self._progress.update(task, completed=done, chunks=number)
        self._progress.remove_task(task)


@contextmanager
def tracking() -> Iterator[Tracking]:
    """On stderr; silent where that is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[chunks]:,} chunks"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Tracking(progress)
