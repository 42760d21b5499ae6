"""What a model's files recommend for sampling, in the words of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.errors import InputError
from ebbtide.params import SamplingParams

GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
HUGGING_FACE_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ``general.sampling`` keys."""
    return _valid({ours: metadata.get(theirs) for theirs, ours in GGUF_NAMES.items()})


def from_hugging_face(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw``: the content of ``generation_config.json``. An explicit ``do_sample: false`` is greedy."""
    found = _valid({name: raw.get(name) for name in HUGGING_FACE_NAMES})
    return found | {"temperature": 0.0} if raw.get("do_sample") is False else found


def _valid(given: Mapping[str, Any]) -> dict[str, Any]:
    """A recommendation that no request could ask for is left out: it must not fail every request."""
    found = {}
    for name, value in given.items():
        try:
            params = SamplingParams(**{name: value})
        except InputError:
            continue
        if getattr(params, name) is not None:
            found[name] = value
    return found
