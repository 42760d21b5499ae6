"""Finds who opens a tier: packages say so by the entry point ``ebbtide.tiers``, by the URL's scheme."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from urllib.parse import urlsplit

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import OpenTier, Tier, TierContext

GROUP = "ebbtide.tiers"


def open_tier(url: str, context: TierContext) -> Tier:
    """Open the tier that a URL names. Raises InputError, in one sentence, where that cannot work."""
    return find(url)(url, context)


def find(url: str) -> OpenTier:
    """Who opens tiers with this URL's scheme."""
    scheme = urlsplit(url).scheme
    found: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if scheme not in found:
        known = ", ".join(f"{name}://" for name in sorted(found))
        raise InputError(f"no tier is known for {url!r}: its URL must begin with one of {known}")
    point = found[scheme]
    try:
        opener: OpenTier = point.load()
    except Exception as error:  # somebody else's package
        raise InputError(
            f"the tier for {scheme}:// is in {point.value}, which cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
    return opener
