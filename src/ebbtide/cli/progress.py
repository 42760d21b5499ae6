"""Progress on the terminal, for what takes longer than a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


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
