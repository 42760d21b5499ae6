"""The tokenizer that a GGUF file describes in its metadata.

``tokenizer.ggml.model`` says which algorithm: ``gpt2`` is byte-level BPE with merges, its way of
splitting text into words named by ``tokenizer.ggml.pre``; ``llama`` is SentencePiece BPE, where the
scores of the pieces say what is merged first (Kudo and Richardson 2018, arXiv 1808.06226).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.errors import InputError
from ebbtide.models.tokenizer import SPACE, Spelling, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# How the tokenizers of published models split text before merging. ``\p{N}`` alone: digit by digit.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENGLISH}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_ENGLISH}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Applied one after the other, each within the pieces of the one before.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
# Whole words that are in the vocabulary are taken as they are, and BOS is added unless denied.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Raises ``InputError`` for a kind of tokenizer that is not known, or a damaged one."""
    keys = _Keys(metadata, path)
    if keys.model == "gpt2":
        backend, spelling = _byte_level(keys), Spelling(byte_level=True)
    elif keys.model == "llama":
        backend = _sentence_piece(keys)
        spelling = Spelling(byte_level=False, strip_space=keys.flag("add_space_prefix", True))
    else:
        raise InputError(
            f"{path} has a tokenizer of type {keys.model!r}; supported are: gpt2, llama"
        )
    _add_special_tokens(backend, keys)
    bos, eos = keys.token("bos_token_id"), keys.token("eos_token_id")
    ends = (eos, keys.token("eot_token_id"), keys.token("eom_token_id"))
    adds_bos = keys.flag("add_bos_token", keys.model == "llama" or keys.pre in WHOLE_WORDS)
    special = {name: keys.token(key) for name, key in _SPECIAL_KEYS.items()}
    return Tokenizer(
        backend,
        spelling,
        bos_id=bos,
        eos_ids=[number for number in ends if number is not None],
        prefix=[bos] if adds_bos and bos is not None else [],
        suffix=[eos] if keys.flag("add_eos_token", False) and eos is not None else [],
        templates=_templates(metadata),
        special_names={n: keys.tokens[i] for n, i in special.items() if i is not None},
    )


class _Keys:
    """Checked access to ``tokenizer.ggml.*``."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata, self.path = metadata, path
        self.model = self.get("model")
        self.pre = self.get("pre") or "default"
        self.tokens: list[str] = self.listed("tokens", str)
        count = len(self.tokens)
        kinds = self.get("token_type") is not None
        self.types: list[int] = self.listed("token_type", int) if kinds else [_NORMAL] * count
        if len(self.types) != count:
            raise self.damaged(f"{count} tokens and {len(self.types)} token types")

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def listed(self, name: str, kind: type) -> list[Any]:
        values = self.get(name)
        if values is None or values == []:
            raise InputError(f"{self.path} has no tokenizer.ggml.{name}; convert it again")
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.damaged(f"tokenizer.ggml.{name} is not a list of {kind.__name__} values")
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def token(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.damaged(
                f"tokenizer.ggml.{name} is {value!r}, and the vocabulary has "
                f"{len(self.tokens)} tokens"
            )
        return value

    def damaged(self, what: object) -> InputError:
        return InputError(f"{self.path} has a damaged tokenizer: {what}")

    def vocabulary(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def _byte_level(keys: _Keys) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    if not isinstance(keys.pre, str) or keys.pre not in SPLITS:
        raise InputError(
            f"{keys.path} splits text the way {keys.pre!r} does (tokenizer.ggml.pre); supported "
            f"are: {', '.join(sorted(SPLITS))}"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in keys.listed("merges", str)]
    if not all(len(pair) == 2 for pair in pairs):
        raise keys.damaged("a merge must be two tokens with a space between them")
    try:
        model = models.BPE(keys.vocabulary(), pairs, ignore_merges=keys.pre in WHOLE_WORDS)
    except Exception as error:  # the library raises a bare Exception
        raise keys.damaged(error) from None
    backend = Backend(model)
    if keys.pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(SPLITS[keys.pre])
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(patterns: tuple[str, ...]) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _sentence_piece(keys: _Keys) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = keys.token("unknown_token_id")
    try:
        model = models.BPE(
            keys.vocabulary(),
            _merges_by_score(keys),
            unk_token=None if unknown is None else keys.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # the library raises a bare Exception
        raise keys.damaged(error) from None
    backend = Backend(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if keys.flag("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges_by_score(keys: _Keys) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best: as a list of merges, every way
    to split a piece into two pieces, best piece first."""
    scores = keys.listed("scores", float)
    if len(scores) != len(keys.tokens):
        raise keys.damaged(f"{len(keys.tokens)} tokens and {len(scores)} scores")
    mergeable = (_NORMAL, _USER_DEFINED, _UNUSED)
    known = {t for t, kind in zip(keys.tokens, keys.types, strict=True) if kind in mergeable}
    best_first = sorted(range(len(scores)), key=lambda number: -scores[number])
    return [
        (piece[:at], piece[at:])
        for piece in map(keys.tokens.__getitem__, best_first)
        if piece in known
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]


def _add_special_tokens(backend: Backend, keys: _Keys) -> None:
    from tokenizers import AddedToken

    by_type: dict[int, list[AddedToken]] = {}
    for token, kind in zip(keys.tokens, keys.types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token:
            special = kind != _USER_DEFINED
            by_type.setdefault(kind, []).append(
                AddedToken(token, normalized=False, special=special)
            )
    backend.add_special_tokens(by_type.get(_UNKNOWN, []) + by_type.get(_CONTROL, []))
    backend.add_tokens(by_type.get(_USER_DEFINED, []))


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return {name: value for name, value in named.items() if isinstance(value, str)}
