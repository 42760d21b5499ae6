"""Text to token ids and back. A thin layer over the ``tokenizers`` library.

Encoding is the library's. Decoding is ours, and is defined on bytes: the bytes of the tokens, one
after the other, read as UTF-8 with U+FFFD for what is not UTF-8. So a token's bytes never depend on
its neighbours, and text can be streamed without ever taking anything back. It differs from the
library in two places, both on purpose: in a SentencePiece vocabulary a run of byte tokens that is
only partly valid keeps its valid characters, and an added token always stands for its own text.

Text that spells a special token becomes that token, also inside a chat message: that is what Hugging
Face transformers does by default, and what chat templates rely on. Whoever feeds untrusted text can
ask ``special_in`` first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ebbtide.errors import InputError
from ebbtide.models.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

END_OF_GENERATION = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end▁of▁sentence|>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of bytes as printable characters (GPT-2, Radford et al. 2019, 2.2):
    character -> byte. Printable Latin-1 stands for itself, the rest is numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + number): byte for number, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary spells bytes. byte_level: with ``byte_alphabet``; else as SentencePiece does.
    strip_space: the text loses one leading space, which encoding had put there."""

    byte_level: bool
    strip_space: bool = False

    @staticmethod
    def of(decoder: object, source: object) -> Spelling:
        """Read it off a decoder of the ``tokenizers`` library; ``InputError`` where it is neither."""
        state = getattr(decoder, "__getstate__", lambda: b"null")()
        described = json.loads(state) if isinstance(state, bytes) else None
        described = described or {"type": "none"}
        parts = described.get("decoders", [described])
        kinds = [part["type"] for part in parts]
        if kinds == ["ByteLevel"]:
            return Spelling(byte_level=True)
        known = {"Replace", "ByteFallback", "Fuse", "Strip"}
        if "ByteFallback" in kinds and set(kinds) <= known:
            strips = [part for part in parts if part["type"] == "Strip"]
            if all((p["content"], p["start"], p["stop"]) == (" ", 1, 0) for p in strips):
                return Spelling(byte_level=False, strip_space=bool(strips))
        raise InputError(
            f"{source}: its tokenizer decodes with {' + '.join(kinds)}; supported are byte-level BPE "
            "and SentencePiece BPE with byte fallback"
        )


class Tokenizer:
    """Immutable once built, and safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        spelling: Spelling,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
        special_names: Mapping[str, str] | None = None,
    ) -> None:
        """prefix, suffix: ids that ``encode`` puts around a text. eos_ids: joined by every special
        token that is known to end a generation. templates: chat templates by name, ``default``
        among them. special_names: what templates see (``bos_token``, ``eos_token``, ...)."""
        self._backend = backend
        self._spelling = spelling
        self._prefix, self._suffix = list(prefix), list(suffix)
        added = backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        known_ends = {i for i in self.special_ids if self._added[i] in END_OF_GENERATION}
        self.eos_ids = frozenset(eos_ids) | known_ends
        self._chat = ChatTemplate(templates or {}, special_names or {})
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """add_special: with what the model wants around a text (usually BOS, or nothing). Lone
        surrogates, which no UTF-8 has, become U+FFFD."""
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._backend.encode(whole, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; ids that name no token count as empty."""
        detokenizer = Detokenizer(self, skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """A new stream, for the output of one request."""
        return Detokenizer(self, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, special tokens included; may be part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text, U+FFFD where they are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def special_in(self, text: str) -> list[int]:
        """The special tokens that ``text`` spells, in order."""
        return [number for number in self.encode(text, False) if number in self.special_ids]

    @property
    def strips_space(self) -> bool:
        """Whether decoding drops one space at the start of a text."""
        return self._spelling.strip_space

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can work at all."""
        return self._chat.available

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The model's chat template over ``messages``. variables: whatever else a template reads
        (``enable_thinking``). Raises ``InputError`` with the template's own message."""
        return self._chat.render(messages, tools, add_generation_prompt, variables or {})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """``render_chat``, encoded. Templates write BOS themselves, so none is added."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        return self.encode(text, add_special=False)

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 31:
            return b""
        added = self._added.get(token_id)
        text = added if added is not None else self._backend.id_to_token(token_id) or ""
        if self._spelling.byte_level:
            if added is None and all(character in self._alphabet for character in text):
                return bytes(self._alphabet[character] for character in text)
            return text.encode()
        if added is None and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        return text.replace(SPACE, " ").encode()

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """``token_bytes`` of every id, for whoever needs all of them at once."""
        return [self.token_bytes(number) for number in range(self.vocab_size)]


class Detokenizer:
    """Token ids to text, a token at a time, in time that does not grow with the text.

    ``push`` returns what is certain: never part of a character, and nothing that a later token could
    change. What ``push`` returned, then ``flush``, is exactly ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The new text that ``token_id`` makes certain; often empty within a character."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_next and data:
            self._strip_next = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What was held back, at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)
