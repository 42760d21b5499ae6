"""Choose tokens from logits.

A token is a function of (logits, parameters, seed, output index) and of nothing else: rows that are
not plainly greedy are computed one by one, and the single random number that a token needs comes
from hashing (seed, output index), so nothing depends on the batch or on what was sampled before.

The order in which parameters act on a row of logits (float32)::

    repetition penalty -> presence, frequency penalty -> logit_bias -> min_tokens
    -> temperature -> top_k -> top_p (of what top_k left) -> min_p (relative to the best)

Log-probabilities are those of the model: log-softmax of the raw logits, before any of this.

Equal logits are ordered by token id, lowest first, wherever an order matters. Logits that are not
numbers count as -inf; where no number is left, the token is 0. So a broken row gets a token that
is wrong but the same every time, and the rows beside it do not notice.

Sources: nucleus (top_p): Holtzman et al. 2020; min_p: Nguyen et al. 2024; repetition penalty:
Keskar et al. 2019 (CTRL); presence and frequency penalties: the OpenAI API reference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ebbtide.core.plan import TokenLogprob
from ebbtide.params import SamplingParams

T = TypeVar("T")

NUCLEUS_FIRST = 256  # candidates ordered before all of them are: enough for nearly every top_p


class Ask(NamedTuple):
    """What one row of logits is to become. ``tokens``: prompt, then output; at least ``length`` of
    them, of which the last ``output_index`` of the first ``length`` are output. ``last`` replaces the
    final one where it is not in ``tokens`` yet."""

    sampling: SamplingParams
    output_index: int
    tokens: Sequence[int]
    length: int
    last: int | None = None

    def history(self) -> list[int]:
        """The ``length`` tokens so far."""
        if self.last is None:
            return list(self.tokens[: self.length])
        return [*self.tokens[: self.length - 1], self.last]


def sample(logits: Tensor, asks: Sequence[Ask]) -> tuple[list[int], dict[int, TokenLogprob]]:
    """One token per row of ``logits`` [rows, vocab]; log-probabilities of the rows that asked.

    ``sampling`` must have every ``None`` filled (``with_defaults``) and, above temperature 0, a seed.
    """
    plain = [_is_plain(ask) for ask in asks]
    tokens = _best(logits).tolist() if any(plain) else [0] * len(asks)
    logprobs: dict[int, TokenLogprob] = {}
    for i, ask in enumerate(asks):
        wants = ask.sampling.logprobs
        if plain[i] and wants is None:
            continue
        row = logits[i].to(torch.float32)
        if not plain[i]:
            tokens[i] = _sample_row(row, ask)
        if wants is not None:
            logprobs[i] = _logprob(row, tokens[i], wants)
    return tokens, logprobs


def uniform(seed: int, output_index: int) -> float:
    """A number in (0, 1) from hashing its arguments: counter-based, so that it needs no state."""
    message = b"ebbtide sample" + seed.to_bytes(16, "little", signed=True)
    message += output_index.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 11
    return (bits + 0.5) / (1 << 53)


def _is_plain(ask: Ask) -> bool:
    """Whether the best raw logit is the answer."""
    return ask.sampling.temperature == 0 and not _changes_logits(ask)


def _changes_logits(ask: Ask) -> bool:
    sampling = ask.sampling
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or (ask.output_index < sampling.min_tokens and sampling.stop_token_ids)
    )


def _best(logits: Tensor) -> Tensor:
    """Index of the largest number along the last axis, the lowest of equals."""
    values, best = logits.max(dim=-1)  # argmax in bfloat16 takes four times as long
    if bool(values.isnan().any()):  # max takes NaN for the largest
        best = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(dim=-1)
    return best


def _sample_row(logits: Tensor, ask: Ask) -> int:
    """One token from one row of logits [vocab]."""
    sampling = ask.sampling
    if _changes_logits(ask):
        logits = _adjusted(logits.clone(), ask)
    if sampling.temperature == 0:
        return int(_best(logits))
    best = float(logits.amax())
    if not math.isfinite(best):  # NaN, or infinities: there is no distribution to draw from
        return int(_best(logits))
    draw = uniform(_not_none(sampling.seed), ask.output_index)
    # Weights relative to the best, so that no temperature overflows. In float64: the sum of a
    # vocabulary of float32 would lose the tail.
    temperature = max(_not_none(sampling.temperature), 1e-6)
    scores = (logits.to(torch.float64) - best) / temperature
    top_k, top_p = _not_none(sampling.top_k), _not_none(sampling.top_p)
    min_p = _not_none(sampling.min_p)
    if not 0 < top_k < len(logits) and top_p >= 1:
        weights = scores.exp_()
        if min_p > 0:
            weights = torch.where(weights >= min_p, weights, 0)
        return _draw(weights, draw)
    order, weights = _candidates(scores, int(top_k), top_p)
    if min_p > 0:
        keep = max(1, int((weights >= min_p).sum()))
        order, weights = order[:keep], weights[:keep]
    return int(order[_draw(weights, draw)])


def _adjusted(logits: Tensor, ask: Ask) -> Tensor:
    """Penalties, biases and the ban on stopping early, in place."""
    sampling, device, vocab = ask.sampling, logits.device, len(logits)
    history = ask.history() if _needs_history(sampling) else []
    if sampling.repetition_penalty != 1.0:
        said = torch.tensor(sorted(set(history)), dtype=torch.int64, device=device)
        scores = logits[said]
        penalty = _not_none(sampling.repetition_penalty)
        logits[said] = torch.where(scores > 0, scores / penalty, scores * penalty)
    output = history[len(history) - ask.output_index :]
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = torch.tensor(output, dtype=torch.int64).unique(return_counts=True)
        loss = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[said.to(device)] -= loss.to(device, logits.dtype)
    bias = {token: value for token, value in sampling.logit_bias.items() if token < vocab}
    if bias:
        index = torch.tensor(list(bias), dtype=torch.int64, device=device)
        logits[index] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=device)
    if ask.output_index < sampling.min_tokens:
        banned = [token for token in sampling.stop_token_ids if token < vocab]
        logits[torch.tensor(banned, dtype=torch.int64, device=device)] = -math.inf
    return logits


def _needs_history(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _candidates(scores: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Tokens that top_k and top_p leave, best first, and their weights: exp(score), scores <= 0.

    Ordering a whole vocabulary is slow, so without a top_k only the best few are ordered first;
    what they miss of the total says whether they were enough.
    """
    vocab = len(scores)
    if 0 < top_k < vocab:
        order = _ordered(scores, top_k)
        weights = scores[order].exp()
        return _nucleus(order, weights, float(weights.sum()), top_p)
    total = float(scores.exp().sum())
    order = _ordered(scores, min(NUCLEUS_FIRST, vocab))
    weights = scores[order].exp()
    if float(weights.sum()) < top_p * total:
        order = _ordered(scores, vocab)
        weights = scores[order].exp()
    return _nucleus(order, weights, total, top_p)


def _ordered(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best tokens, best first, equals by token id."""
    if count < len(scores):
        least = scores.topk(count, sorted=False).values.amin()
        tokens = (scores >= least).nonzero().squeeze(1)  # ties at the end: some too many
        return tokens[scores[tokens].argsort(descending=True, stable=True)[:count]]
    return scores.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)


def _nucleus(order: Tensor, weights: Tensor, total: float, top_p: float) -> tuple[Tensor, Tensor]:
    """The shortest head of ``order`` that holds at least ``top_p`` of ``total``."""
    if top_p >= 1:
        return order, weights
    before = weights.cumsum(0) - weights
    keep = max(1, int((before < top_p * total).sum()))
    return order[:keep], weights[:keep]


def _draw(weights: Tensor, draw: float) -> int:
    """Index drawn with probability proportional to weight: the inverse of the cumulative sum."""
    cumulative = weights.cumsum(0)
    target = draw * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, int(weights.nonzero()[-1]))


def _logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).log_softmax(0)
    top: list[tuple[int, float]] = []
    if count:
        best = _ordered(logprobs, min(count, len(logprobs)))
        top = list(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), tuple(top))


def _not_none(value: T | None) -> T:
    assert value is not None, "the engine fills every parameter that was not said"
    return value
