"""The sampler against a slow reference, its distribution, and what a token may depend on."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebbtide.models.sampler import Ask, sample, uniform
from ebbtide.params import SamplingParams

VOCAB = 24
PROMPT = [3, 4, 4, 5]


def params(**said) -> SamplingParams:
    said.setdefault("seed", 1)
    return SamplingParams(**said).with_defaults({})


def ask(sampling: SamplingParams, output: list[int] | None = None, index: int | None = None) -> Ask:
    output = output or []
    tokens = PROMPT + output
    return Ask(sampling, len(output) if index is None else index, tokens, len(tokens))


def one(logits: Tensor, request: Ask) -> int:
    return sample(logits[None], [request])[0][0]


def slow_distribution(logits: list[float], request: Ask) -> dict[int, float]:
    """What the documentation of the sampler says, in plain Python: token -> probability."""
    s = request.sampling
    x = list(logits)
    history = request.history()
    output = history[len(history) - request.output_index :]
    for token in set(history):
        x[token] = (
            x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        )
    for token, count in Counter(output).items():
        x[token] -= s.presence_penalty + s.frequency_penalty * count
    for token, bias in s.logit_bias.items():
        x[token] += bias
    if request.output_index < s.min_tokens:
        for token in s.stop_token_ids:
            x[token] = -math.inf
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if s.temperature == 0:
        return {order[0]: 1.0}
    weight = [math.exp((v - x[order[0]]) / s.temperature) for v in x]
    if s.top_k:
        order = order[: s.top_k]
    total, kept, mass = sum(weight[t] for t in order), [], 0.0
    for token in order:
        if mass >= s.top_p * total and s.top_p < 1:
            break
        kept.append(token)
        mass += weight[token]
    kept = [t for t in kept if weight[t] >= s.min_p] or order[:1]
    total = sum(weight[t] for t in kept)
    return {t: weight[t] / total for t in kept if weight[t] > 0}


sampling_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.sampled_from([0.05, 0.37, 0.81, 1.0]),
    min_p=st.sampled_from([0.0, 0.11, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.5, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([-0.7, 0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 5.0])),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
)
rows = st.lists(
    st.integers(-24, 24).map(lambda v: v / 4),  # many ties
    min_size=VOCAB,
    max_size=VOCAB,
)
outputs = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows, sampling_params, outputs)
def test_every_token_is_one_that_the_reference_allows(logits, sampling, output):
    request = ask(sampling, output)
    allowed = slow_distribution(logits, request)
    token = one(torch.tensor(logits), request)
    assert token in allowed
    if len(allowed) == 1:
        assert token == next(iter(allowed))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rows, st.lists(st.tuples(sampling_params, outputs), min_size=2, max_size=5))
def test_a_token_does_not_depend_on_the_rows_beside_it(logits, asked):
    asks = [ask(sampling, output) for sampling, output in asked]
    batch = torch.tensor(logits) + torch.arange(len(asks))[:, None] * 0.25
    together = sample(batch, asks)[0]
    assert together == [one(batch[i], asks[i]) for i in range(len(asks))]
    assert together[::-1] == sample(batch.flip(0), asks[::-1])[0]


SAID = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
]
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": -0.5}
DRAWS = 3000


def check_distribution(requests: list[Ask]) -> None:
    """Pearson's chi-square of one draw per request against the reference's distribution."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    expected = slow_distribution(logits.tolist(), requests[0])
    counts = Counter(one(logits, request) for request in requests)
    assert counts.keys() <= expected.keys()
    total = len(requests)
    square = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in expected.items())
    freedom = len(expected) - 1
    assert square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("said", [*SAID, PENALTIES])
def test_over_seeds_the_distribution_is_the_reference_one(said):
    check_distribution([ask(params(**said, seed=i), output=[4, 9, 9]) for i in range(DRAWS)])


@pytest.mark.parametrize("said", SAID)
def test_over_output_indices_the_distribution_is_the_reference_one(said):
    check_distribution([ask(params(**said, seed=77), index=i) for i in range(DRAWS)])


def test_a_large_vocabulary_gives_the_nucleus_of_the_full_order():
    """More than the first few candidates are needed, and ties straddle the cut."""
    generator = torch.Generator().manual_seed(3)
    for spread in (0.01, 1.0, 6.0):
        logits = (torch.randn(5000, generator=generator) * spread * 4).round() / 4
        for said in ({"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 700, "top_p": 0.5}, {"top_k": 1}):
            for seed in range(5):
                request = ask(params(**said, seed=seed))
                expected = slow_distribution(logits.tolist(), request)
                # the token at the same place of the cumulative sum, best first
                target, mass = uniform(seed, 0), 0.0
                for token, probability in expected.items():  # noqa: B007
                    mass += probability
                    if mass > target:
                        break
                assert one(logits, request) == token


def test_uniform_numbers_are_spread_and_differ():
    numbers = [uniform(seed, index) for seed in range(-5, 45) for index in range(40)]
    assert len(set(numbers)) == len(numbers)
    assert 0 < min(numbers) < 0.01 < 0.99 < max(numbers) < 1
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(150 < tenths[i] < 250 for i in range(10))


def test_the_token_still_sampled_counts_in_penalties():
    logits = torch.zeros(VOCAB)
    logits[7] = 1.0
    sampling = params(temperature=0.0, presence_penalty=2.0)
    in_tokens = Ask(sampling, 1, [*PROMPT, 7, 9], 5)
    beside = Ask(sampling, 1, PROMPT, 5, 7)
    assert one(logits, in_tokens) == one(logits, beside) == 0


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0] + [-9.0] * 20)
    sampling = params(temperature=0.0, logit_bias={3: 50.0}, logprobs=3)
    tokens, logprobs = sample(logits[None], [ask(sampling)])
    raw = logits.log_softmax(0).tolist()
    assert tokens == [3]
    assert logprobs[0].token == 3
    assert logprobs[0].logprob == pytest.approx(raw[3], abs=1e-6)
    assert [token for token, _ in logprobs[0].top] == [1, 2, 0]
    assert [p for _, p in logprobs[0].top] == pytest.approx([raw[1], raw[2], raw[0]], abs=1e-6)


def test_logprobs_only_where_asked():
    asks = [ask(params()), ask(params(logprobs=0)), ask(params(temperature=0.0))]
    _, logprobs = sample(torch.zeros(3, VOCAB), asks)
    assert logprobs.keys() == {1}
    assert logprobs[1].top == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_the_same_token_every_time(temperature):
    request = ask(params(temperature=temperature, top_p=0.5, logprobs=2))
    some = torch.zeros(VOCAB)
    some[2], some[5], some[6] = math.nan, 1.0, -math.inf
    assert one(some, request) == 5
    assert one(torch.full((VOCAB,), math.nan), request) == 0
    assert one(torch.full((VOCAB,), -math.inf), request) == 0
    some[9] = math.inf
    assert one(some, request) == 9


def test_broken_rows_leave_the_rows_beside_them_alone():
    logits = torch.zeros(2, VOCAB)
    logits[0] = math.nan
    logits[1, 4] = 2.0
    assert sample(logits, [ask(params(temperature=0.0))] * 2)[0] == [0, 4]


def test_ids_beyond_the_vocabulary_are_ignored():
    sampling = params(
        temperature=0.0, logit_bias={900: 5.0}, stop_token_ids=frozenset({901}), min_tokens=3
    )
    assert one(torch.arange(float(VOCAB)), ask(sampling)) == VOCAB - 1


def test_bfloat16_logits_tie_to_the_lowest_id():
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    asks = [ask(params(temperature=0.0)), ask(params(top_k=1))]
    assert sample(logits, asks)[0] == [0, 0]


def test_extreme_temperatures_stay_finite():
    logits = torch.linspace(-80, 80, VOCAB)
    assert one(logits, ask(params(temperature=1e-30))) == VOCAB - 1
    assert 0 <= one(logits, ask(params(temperature=100.0))) < VOCAB
