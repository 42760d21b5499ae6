from __future__ import annotations

import math
from typing import Any

import pytest

from ebbtide.errors import InputError
from ebbtide.params import RepetitionStop, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("stop_token_ids", frozenset({-1})),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("seed", 1 << 64),
        ("logprobs", 21),
        ("n", 0),
        ("n", 65),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**{name: value})
    assert error.value.field == name
    assert name in str(error.value)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InputError, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("rule", [(0, 2), (1, 1), (513, 2), (1, 1_001)])
def test_repetition_rules_have_limits(rule: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        RepetitionStop(*rule)


def test_bounds_themselves_are_allowed() -> None:
    SamplingParams(max_tokens=1, min_tokens=1, temperature=0, top_k=0, top_p=1, min_p=1, n=64)
    SamplingParams(seed=(1 << 64) - 1, logprobs=0, presence_penalty=-2, frequency_penalty=2)


def test_defaults_fill_only_what_was_not_said() -> None:
    params = SamplingParams(temperature=0.3).with_defaults({"temperature": 0.7, "top_p": 0.9})
    assert (params.temperature, params.top_p) == (0.3, 0.9)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (0, 0.0, 1.0)
    assert params.with_defaults({"top_k": 9}) is params


def test_defaults_are_validated_too() -> None:
    with pytest.raises(InputError, match="top_p"):
        SamplingParams().with_defaults({"top_p": 7.0})
