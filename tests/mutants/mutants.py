"""Faults that a careful programmer could make, as edits of the source: the simulator must notice each.

The tables beside this file hold them, one a section: ``old`` occurs exactly once in ``file`` (below
src/ebbtide) and becomes ``new``; ``fault`` says what breaks, and where other engines had it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

TABLES = ("scheduler.toml", "blocks.toml", "offload.toml", "tiers.toml")


class StaleMutant(Exception):
    """The source has changed: the mutant no longer says where its fault is to be planted."""


class Mutant(NamedTuple):
    name: str
    file: str
    fault: str
    old: str
    new: str

    def plant(self, source: Path) -> None:
        """Edit the tree ``source``, a copy of src/ebbtide. Raises StaleMutant."""
        path = source / self.file
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            raise StaleMutant(
                f"mutant {self.name} is stale: {self.file} has its text {count} times"
            )
        path.write_text(text.replace(self.old, self.new))


def read_mutants() -> list[Mutant]:
    tables = [tomllib.loads((Path(__file__).parent / name).read_text()) for name in TABLES]
    return [Mutant(name, **texts) for table in tables for name, texts in table.items()]


MUTANTS = read_mutants()
