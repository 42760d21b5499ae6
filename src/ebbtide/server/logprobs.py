"""Log-probabilities in the two forms of the API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.core.plan import TokenLogprob

if TYPE_CHECKING:
    from ebbtide.models.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``{"content": [...]}``, one entry per token with the best alternatives in it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = [
        entry(item.token, item.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The older form: parallel lists. Knows how much text the tokens so far make, for the offsets.

    A token that ends within a character counts towards the text only once the character is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens. ``top_logprobs`` is null where no alternatives were asked."""
        text_of = self._tokenizer.token_text
        offsets = []
        for item in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(item.token)))
        tops = []
        for item in logprobs:
            best: dict[str, float] = {}
            for token, logprob in item.top:
                best.setdefault(text_of(token), _finite(logprob))
            tops.append(best)
        return {
            "tokens": [text_of(item.token) for item in logprobs],
            "token_logprobs": [_finite(item.logprob) for item in logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }
