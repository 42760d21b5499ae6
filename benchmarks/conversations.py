"""Conversations for ``exactness.py``, and what each of their turns should bring: the reference.

Every turn is one request of its own, in an engine without a host tier that has forgotten everything
before it, one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track

import ebbtide.models.executor
from ebbtide.engine.llm import LLM
from ebbtide.models.sampler import Ask, sample
from ebbtide.params import SamplingParams

TOPICS = (
    "tides",
    "lighthouses",
    "harbours",
    "salt marshes",
    "whales",
    "old maps",
    "bread",
    "glass",
    "clocks",
    "bridges",
    "rain",
    "volcanoes",
    "chess",
    "bees",
)
ASKS = (
    "Tell me something about {a} that few people know.",
    "How are {a} and {b} connected? Answer in a few sentences.",
    "Write two lines of a poem about {a}, and do not mention {b}.",
    "Explain {a} to a child who likes {b}.",
    "List three facts about {a}, one of them about {b}.",
)
RULES = (
    "You answer politely and to the point.",
    "When you do not know something, you say so.",
    "You prefer short words to long ones, and examples to definitions.",
    "You never speak of yourself.",
    "Numbers are written out where they are below ten.",
    "You use no lists unless the user asks for one.",
    "Every answer ends with a thought that stays with the reader.",
    "Names of places are explained when they come up for the first time.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """turns, rules (sentences of a system prompt): each drawn from [low, high]. max_tokens: little
    above the low one for nine turns of ten, the high one for the tenth."""

    conversations: int = 50
    turns: tuple[int, int] = (3, 5)
    rules: tuple[int, int] = (2, 16)
    max_tokens: tuple[int, int] = (16, 48)
    stems: int = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and what the reference gave for it.

    gaps: for each token, by how much the best log-probability beats the second. steady: for each
    token, whether it stayed the same under noise of ``NOISE`` on the logits.
    """

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    text: str
    reason: str
    gaps: list[float]
    steady: list[bool]


NOISE = 1e-3  # of a logit, either way
NOISE_TRIALS = 4


class Sampler:
    """The sampler, and whether each of its tokens would have been the same under noise."""

    def __init__(self) -> None:
        self.steady: list[bool] = []
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, logits: torch.Tensor, asks: Sequence[Ask]) -> Any:
        made = sample(logits, asks)
        same = [True] * len(asks)
        for _ in range(NOISE_TRIALS):
            noise = torch.empty_like(logits).uniform_(-NOISE, NOISE, generator=self._generator)
            again, _ = sample(logits + noise, asks)
            same = [s and a == b for s, a, b in zip(same, again, made[0], strict=True)]
        self.steady += same
        return made


def hold(llm: LLM, prompt: list[int], params: SamplingParams) -> Turn:
    """One turn of the reference, with nothing in any cache."""
    llm.reset()
    sampler = Sampler()
    with patch.object(ebbtide.models.executor, "sample", sampler):
        done = llm.generate([prompt], replace(params, logprobs=2))[0]
    gaps = [entry.top[0][1] - entry.top[1][1] for entry in done.logprobs]
    assert len(sampler.steady) == len(done.token_ids), "one request, one step for each token"
    made = (done.token_ids, done.text, done.finish_reason, gaps, sampler.steady)
    return Turn(list(prompt), params, *made)


def stems(traffic: Traffic, rng: random.Random) -> list[str]:
    """System prompts; each has the beginning of the one before."""
    made: list[str] = []
    for _ in range(traffic.stems):
        rules = made[-1].split("\n") if made else []
        rules = rules[: len(rules) // 2]
        rules += rng.choices(RULES, k=rng.randint(*traffic.rules))
        made.append("\n".join(rules))
    return made


def sampling(number: int, traffic: Traffic, rng: random.Random) -> SamplingParams:
    """Greedy for two turns out of four, one of them with a penalty; the others drawn with a seed."""
    kinds: tuple[dict[str, float], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 1.0, "top_k": 50},
    )
    low, high = traffic.max_tokens
    return SamplingParams(
        max_tokens=high if rng.random() < 0.1 else rng.randint(low, (7 * low + high) // 8),
        seed=rng.randrange(1 << 32),
        **kinds[number % len(kinds)],  # type: ignore[arg-type]
    )


def reference(
    llm: LLM, traffic: Traffic, rng: random.Random, steady_only: bool = False
) -> list[list[Turn]]:
    """Hold the conversations, one request at a time, forgetting all KV before each.

    steady_only: turns end before the first token that hangs on a hair.
    """

    def encode(text: str) -> list[int]:
        return llm.tokenizer.encode(text, add_special=False)

    systems = stems(traffic, rng)
    ends = llm.tokenizer.eos_ids
    conversations = []
    for number in track(range(traffic.conversations), "reference", transient=True):
        tokens = encode(f"<|im_start|>system\n{systems[number % len(systems)]}<|im_end|>\n")
        turns: list[Turn] = []
        for turn in range(rng.randint(*traffic.turns)):
            a, b = rng.sample(TOPICS, 2)
            ask = rng.choice(ASKS[:2] if turn == 0 else ASKS).format(a=a, b=b)
            tokens += encode(f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n")
            params = sampling(number + turn, traffic, rng)
            made = hold(llm, tokens, params)
            if steady_only and not all(made.steady):
                count = made.steady.index(False)
                if count == 0:
                    continue  # this question stays without an answer
                made = hold(llm, tokens, replace(params, max_tokens=count))
            turns.append(made)
            tokens = (
                tokens + made.tokens + encode("\n" if made.tokens[-1] in ends else "<|im_end|>\n")
            )
        if turns:
            conversations.append(turns)
    return conversations
