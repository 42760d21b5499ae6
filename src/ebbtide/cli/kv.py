"""``ebbtide kv``: look after what tiers have stored, while servers use them or not."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.options import Failure, parse_bytes, tier_urls
from ebbtide.errors import InputError, readable_bytes

if TYPE_CHECKING:
    from ebbtide.cli.progress import Tracking
    from ebbtide.cli.stored import Amount, Place, Removal, Rule, Survey, Verification

app = typer.Typer()

WIDTH_IN_FILES = 250
NAMESPACE_DIGITS = 12  # shown to people: enough to tell them apart, and for --namespace
SHOWN_MAX = 20  # problems, to people
AGE_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Disk = Annotated[str | None, typer.Option(help="A directory that --disk of a server named.")]
Valkey = Annotated[str | None, typer.Option(help="A Valkey or Redis server, by its URL.")]
Object = Annotated[str | None, typer.Option(help="An object store, by its URL.")]
Tier = Annotated[list[str] | None, typer.Option(help="Any tier, by its URL; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback(invoke_without_command=True)
def _all_commands(context: typer.Context) -> None:
    """Look after the KV that tiers have stored: disks, Valkey, object stores."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def stat(
    disk: Disk = None,
    valkey: Valkey = None,
    object: Object = None,
    tier: Tier = None,
    as_json: Json = False,
) -> None:
    """Say how much is stored, of which models and layouts, and how old it is."""
    from ebbtide.cli.stored import survey

    with _opened(disk, valkey, object, tier) as places:
        surveys = []
        for place in places:
            with _progress(place) as progress:
                surveys.append(survey(progress.track(place.inventory.entries(), "counting")))
    if as_json:
        _print_json(places, [_survey_json(found) for found in surveys])
    else:
        _print_surveys(places, surveys)


@app.command()
def verify(
    disk: Disk = None,
    valkey: Valkey = None,
    object: Object = None,
    tier: Tier = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove chunks that are bad.")] = False,
    as_json: Json = False,
) -> None:
    """Read all chunks and check them. The exit code is 1 where any is bad."""
    from ebbtide.cli import stored

    reports = []
    with _opened(disk, valkey, object, tier) as places:
        for place in places:
            entries = place.inventory.entries
            with _progress(place) as progress:
                total = 0
                if progress.is_shown:
                    total = stored.survey(progress.track(entries(), "counting")).total.bytes
                checked = progress.track(entries(), "verifying", total)
                reports.append(stored.verify(place.inventory, checked, remove))
            if not as_json:
                _print_verification(place, reports[-1], remove)
    if as_json:
        _print_json(places, [_verification_json(report) for report in reports])
    if any(report.bad for report in reports):
        raise typer.Exit(1)


@app.command()
def prune(
    disk: Disk = None,
    valkey: Valkey = None,
    object: Object = None,
    tier: Tier = None,
    older_than: Annotated[
        str | None, typer.Option(help="Not used for so long, such as 30d, 12h or 90m.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of one model and layout: its first digits, as stat says.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="The oldest, until a tier holds no more, such as 10GiB.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove chunks by age, model or size. What meets all that is said goes, the oldest first."""
    from ebbtide.cli import stored

    if older_than is None and namespace is None and to is None:
        raise InputError("say what is to be removed: --older-than, --namespace or --to")
    rule = stored.Rule(
        namespace="" if namespace is None else _digits(namespace),
        used_before=None if older_than is None else time.time() - parse_age(older_than),
        to_bytes=None if to is None else parse_bytes(to, "--to"),
    )
    reports = []
    with _opened(disk, valkey, object, tier) as places:
        for place in places:
            reports.append(_prune(place, rule, dry_run))
            if not as_json:
                _print_removal(place, reports[-1], dry_run)
    _end_removal(places, reports, as_json, dry_run)


@app.command()
def clear(
    disk: Disk = None,
    valkey: Valkey = None,
    object: Object = None,
    tier: Tier = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all chunks, of every model and layout. Nothing else in the place is touched."""
    from ebbtide.cli import stored

    if not yes and not sys.stdin.isatty():
        raise InputError("clear asks before it removes anything, and nobody is there: add --yes")
    reports = []
    with _opened(disk, valkey, object, tier) as places:
        if not yes:
            _ask(places)
        for place in places:
            with _progress(place) as progress:
                entries = progress.track(place.inventory.entries(), "removing")
                reports.append(stored.remove(place.inventory, entries))
            if not as_json:
                _print_removal(place, reports[-1], dry_run=False)
    _end_removal(places, reports, as_json, dry_run=False)


def parse_age(text: str) -> float:
    """ "30d", "1.5 h" -> seconds. Raises InputError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise InputError(f"--older-than must be an age such as 30d, 12h or 90m, got {text!r}")
    return float(match[1]) * AGE_S[match[2]]


def readable_age(seconds: float) -> str:
    """ "just now", "12 min", "3 d": one unit is enough."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (seconds >= size and unit == "min"):
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "just now"


def _prune(place: Place, rule: Rule, dry_run: bool) -> Removal:
    from ebbtide.cli import stored

    with _progress(place) as progress:
        going = stored.chosen(lambda: progress.track(place.inventory.entries(), "pruning"), rule)
        if dry_run:
            return stored.Removal(stored.survey(going).total)
        return stored.remove(place.inventory, going)


def _digits(namespace: str) -> str:
    if not re.fullmatch("[0-9a-f]{1,64}", namespace.lower()):
        raise InputError(
            f"--namespace must be up to 64 hexadecimal digits, as kv stat says them, got {namespace!r}"
        )
    return namespace.lower()


@contextmanager
def _opened(
    disk: str | None, valkey: str | None, object: str | None, others: Sequence[str] | None
) -> Iterator[list[Place]]:
    from ebbtide.cli.stored import opened

    urls = tier_urls(disk, None, None, valkey, object, others or ())
    if not urls:
        raise InputError("say where KV is stored: --disk, --valkey, --object or --tier")
    # A tier says in its results what is wrong; what it logs for servers would say it twice.
    logging.getLogger("ebbtide").addHandler(logging.NullHandler())
    with opened(urls) as places:
        yield places


@contextmanager
def _progress(place: Place) -> Iterator[Tracking]:
    """Raises Failure, which names the tier, where it cannot be listed."""
    from ebbtide.cli.progress import tracking

    try:
        with tracking() as progress:
            yield progress
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise Failure(
            f"{place.label} could not be listed: {error.strerror or error}{where}"
        ) from error


def _ask(places: Sequence[Place]) -> None:
    """Raises Failure where the answer is no."""
    from ebbtide.cli.stored import survey

    found = []
    for place in places:
        with _progress(place) as progress:
            total = survey(progress.track(place.inventory.entries(), "counting")).total
        found.append(f"{_amount(total)} in {place.label}")
    if not typer.confirm(f"Remove {' and '.join(found)}?", err=True):
        raise Failure("nothing was removed")


def _amount(amount: Amount) -> str:
    chunks = "1 chunk" if amount.chunks == 1 else f"{amount.chunks:,} chunks"
    return f"{chunks} ({readable_bytes(amount.bytes)})"


def _print_json(places: Sequence[Place], reports: Sequence[dict[str, Any]]) -> None:
    tiers = [{"tier": place.label} | report for place, report in zip(places, reports, strict=True)]
    typer.echo(json.dumps({"tiers": tiers}, indent=2))


def _amount_json(amount: Amount) -> dict[str, Any]:
    return {
        "chunks": amount.chunks,
        "bytes": amount.bytes,
        "oldest_use": amount.oldest,
        "newest_use": amount.newest,
    }


def _survey_json(found: Survey) -> dict[str, Any]:
    namespaces = [
        {"namespace": namespace.hex()} | _amount_json(amount)
        for namespace, amount in sorted(found.namespaces.items())
    ]
    return _amount_json(found.total) | {"namespaces": namespaces}


def _print_surveys(places: Sequence[Place], surveys: Sequence[Survey]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    now = time.time()

    def cells(amount: Amount) -> list[str]:
        ages = [
            "-" if at is None else readable_age(now - at) for at in (amount.oldest, amount.newest)
        ]
        return [f"{amount.chunks:,}", readable_bytes(amount.bytes), *ages]

    table = Table(box=SIMPLE)
    table.add_column("tier", overflow="fold")
    table.add_column("namespace", no_wrap=True)
    for column in ("chunks", "size", "oldest use", "newest use"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, found in zip(places, surveys, strict=True):
        rows = [(n.hex()[:NAMESPACE_DIGITS], a) for n, a in sorted(found.namespaces.items())]
        if len(rows) != 1:
            rows.append(("all" if rows else "-", found.total))
        for number, (namespace, amount) in enumerate(rows):
            table.add_row(
                "" if number else place.label,
                namespace,
                *cells(amount),
                end_section=number == len(rows) - 1,
            )
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES  # paths stay on one line
    console.print(table)


def _verification_json(report: Verification) -> dict[str, Any]:
    problems = [
        {
            "namespace": entry.namespace.hex(),
            "key": entry.key.hex(),
            "status": result.status.value,
            "message": result.message,
        }
        for entry, result in report.problems
    ]
    return {
        "intact": report.intact.chunks,
        "intact_bytes": report.intact.bytes,
        "corrupt": report.corrupt,
        "failed": report.failed,
        "removed": report.removed,
        "problems": problems,
    }


def _print_verification(place: Place, report: Verification, remove: bool) -> None:
    for _, result in report.problems[:SHOWN_MAX]:
        typer.echo(f"{result.status.value}: {result.message}")
    if report.bad > SHOWN_MAX:
        typer.echo(f"... and {report.bad - SHOWN_MAX:,} more")
    parts = [f"{_amount(report.intact)} intact"]
    if report.corrupt:
        fate = f"{report.removed:,} of them removed" if remove else "--remove removes them"
        parts.append(f"{report.corrupt:,} corrupt ({fate})")
    if report.failed:
        parts.append(f"{report.failed:,} could not be read")
    typer.echo(f"{place.label}: {', '.join(parts)}")


def _print_removal(place: Place, report: Removal, dry_run: bool) -> None:
    done = "would be removed" if dry_run else "removed"
    failed = f", {report.failed:,} could not be: {report.why}" if report.failed else ""
    typer.echo(f"{place.label}: {_amount(report.removed)} {done}{failed}")


def _end_removal(
    places: Sequence[Place], reports: Sequence[Removal], as_json: bool, dry_run: bool
) -> None:
    if as_json:
        told = [
            {
                "removed": report.removed.chunks,
                "removed_bytes": report.removed.bytes,
                "failed": report.failed,
                "why": report.why,
                "dry_run": dry_run,
            }
            for report in reports
        ]
        _print_json(places, told)
    if any(report.failed for report in reports):
        raise typer.Exit(1)
