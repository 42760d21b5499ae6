"""Finds who opens a tier: packages say so by the entry point ``ebbtide.tiers``, by the URL's scheme.

Messages have the scheme and no more of the URL, which may hold a password.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from urllib.parse import unquote_plus

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import OpenTier, Tier, TierContext

GROUP = "ebbtide.tiers"


def open_tier(url: str, context: TierContext) -> Tier:
    """Open the tier that a URL names. Raises InputError, in one sentence, where that cannot work."""
    opener = find(url)
    try:
        return opener(url, context)
    except (InputError, AssertionError):
        raise
    except Exception as error:  # somebody else's package, which did not say it as it should
        raise InputError(
            f"the tier for {_scheme(url)}:// cannot be opened: {_one_line(error)}"
        ) from error


def find(url: str) -> OpenTier:
    """Who opens tiers with this URL's scheme."""
    scheme = _scheme(url)
    found: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if scheme not in found:
        known = ", ".join(f"{name}://" for name in sorted(found))
        wrong = f"no tier is known for {scheme}://" if scheme else "a tier is given by its URL"
        there = f"it must begin with one of {known}" if found else "no package brings any"
        raise InputError(f"{wrong}: {there}")
    point = found[scheme]
    try:
        opener: OpenTier = point.load()
    except Exception as error:  # somebody else's package
        raise InputError(
            f"the tier for {scheme}:// is in {point.value}, which cannot be used: {_one_line(error)}"
        ) from error
    if not callable(opener):
        raise InputError(
            f"the tier for {scheme}:// is in {point.value}, which cannot be called to open one"
        )
    return opener


def take_setting(url: str, name: str) -> tuple[str, str | None]:
    """Take a setting that is not the tier's out of its URL, whose other parts stay as they are.

    Returns the URL, and what the setting says, None where it is not given. Raises InputError where it
    is given twice.
    """
    place, _, query = url.partition("?")
    parts = [part for part in query.split("&") if part]
    given = [unquote_plus(part[len(name) + 1 :]) for part in parts if part.startswith(f"{name}=")]
    if len(given) > 1:
        raise InputError(f"a tier's URL has the setting {name!r} twice")
    rest = "&".join(part for part in parts if not part.startswith(f"{name}="))
    return (f"{place}?{rest}" if rest else place), given[0] if given else None


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else ""


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
