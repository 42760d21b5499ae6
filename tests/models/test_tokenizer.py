"""Encoding against transformers and against the algorithms written out; decoding and streaming."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from ebbtide.errors import InputError
from ebbtide.models.gguf_file import read_header
from ebbtide.models.gguf_tokenizer import SPLITS, build_tokenizer
from ebbtide.models.hf_dir import read_tokenizer
from ebbtide.models.load import DEFAULT_MODEL, find_model
from ebbtide.models.tokenizer import Spelling, Tokenizer

from . import tiny_files

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, and trailing  ",
    "It's what they've said; I'll be there. IT'S NOT.",
    "tabs\tand\n\nnewlines\r\n   indented\n    def f(x): return x ** 2\n",
    "naïve café, Ελληνικά, русский, हिन्दी, ไทย",
    "日本語と中文和한국어",
    "🙂👩‍👩‍👧‍👦 flags 🇫🇷 and combining e\u0301 a\u0308",
    "a" * 300,
    "\u200bzero width\ufeff and \x00 control \x1b",
    "https://example.org/path?query=value&other=[1,2]#fragment",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x<|im_end|>y <|im_end|> z",
]
DIGITS = ["in 1999 and 2024", "3.14159, 1e10, ٣٤٥, ½ Ⅷ ²", "v1.2.3-rc4", "12345678901234567890"]


PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)
# Without what the default model's vocabulary lacks the bytes for: control characters, planes 4 to 15.
ANY_TEXT = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t"),
    max_size=40,
)


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    path = find_model(DEFAULT_MODEL).path
    return build_tokenizer(read_header(path).metadata, path)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tiny_files.write_vocabulary(tmp_path_factory.mktemp("spm") / "spm.gguf")
    return build_tokenizer(read_header(path).metadata, path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tiny_files.write_vocabulary(tmp_path_factory.mktemp("bpe") / "bpe.gguf", "gpt2")
    return build_tokenizer(read_header(path).metadata, path)


def test_the_default_model_encodes_as_transformers_does(default: Tokenizer) -> None:
    """Digits apart: transformers' reading of GGUF files does not know how SmolLM splits them."""
    path = find_model(DEFAULT_MODEL).path
    other = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in CORPUS:
        assert default.encode(text) == other.encode(text), text
        assert default.decode(default.encode(text), False) == other.decode(other.encode(text))
    messages = [{"role": "user", "content": "Hi <|im_end|> é"}]
    assert default.render_chat(messages) == other.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (
        default.encode_chat(messages)
        == other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


def test_the_default_model_splits_digits_as_its_own_tokenizer_does(default: Tokenizer) -> None:
    """SmolLM's published tokenizer cuts digits off one by one, then splits as GPT-2 does."""
    published = tokenizers.Tokenizer(default._backend.model)
    published.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in [*CORPUS, *DIGITS]:
        assert default.encode(text) == published.encode(text).ids, text
    assert default.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_words_are_split_as_transformers_splits_them(pre: str, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "words.gguf"
    writer = GGUFWriter(path, "llama")
    tiny_files.add_byte_level_tokenizer(writer, pre)
    tiny_files._finish(writer)
    ours = build_tokenizer(read_header(path).metadata, path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*CORPUS, *DIGITS]:
        split = ours._backend.pre_tokenizer.pre_tokenize_str(text)
        assert split == theirs._tokenizer.pre_tokenizer.pre_tokenize_str(text)


def test_qwen2_normalises_and_llama3_takes_whole_words(tmp_path: Path) -> None:
    def built(pre: str) -> Tokenizer:
        path = tmp_path / f"{pre}.gguf"
        from gguf import GGUFWriter

        writer = GGUFWriter(path, "llama")
        tiny_files.add_byte_level_tokenizer(writer, pre)
        tiny_files._finish(writer)
        return build_tokenizer(read_header(path).metadata, path)

    assert built("qwen2").encode("e\u0301") == built("qwen2").encode("é")
    assert built("gpt-2").encode("e\u0301") != built("gpt-2").encode("é")
    assert built("llama-bpe").encode("hi")[0] == 0  # BOS, which is <|im_start|> here
    assert built("gpt-2").encode("hi")[0] != 0
    assert built("default").encode("abc$$1234")


def best_pair_first(text: str) -> list[int]:
    """SentencePiece BPE as its paper says it: join the best neighbours until there are none."""
    pieces, scores, types = tiny_files.sentence_piece_tokenizer()
    known = {p: scores[i] for i, p in enumerate(pieces) if types[i] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-known[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in known
        ]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        if symbol in known:
            ids.append(pieces.index(symbol))
        else:
            ids.extend(pieces.index(f"<0x{byte:02X}>") for byte in symbol.encode())
    return ids


@PROPERTY
@given(text=st.text("helo wrdtina世界é🙂▁", max_size=20))
def test_sentence_piece_joins_the_best_pair_first(sentence_piece: Tokenizer, text: str) -> None:
    assert sentence_piece.encode(text, add_special=False) == best_pair_first(text)


def test_sentence_piece_encodes_as_transformers_does(tmp_path: Path) -> None:
    path = tiny_files.write_vocabulary(tmp_path / "spm.gguf")
    ours = build_tokenizer(read_header(path).metadata, path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ["hello world", "the hello in 世界, é 🙂!", "hello  two", "<s>"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )
    assert ours.encode("hello")[0] == ours.bos_id == 1
    assert ours.eos_ids == {2}


@PROPERTY
@given(text=ANY_TEXT)
@pytest.mark.parametrize("kind", ["default", "sentence_piece", "byte_level"])
def test_any_text_comes_back(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    if kind == "sentence_piece":
        text = text.replace("▁", "_")  # its own mark for a space
    if tokenizer._added.keys() & set(tokenizer.encode(text, False)):
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text


@PROPERTY
@given(data=st.data())
@pytest.mark.parametrize("kind", ["default", "sentence_piece", "byte_level"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_streamed_text_is_the_decoded_text(
    kind: str, skip_special: bool, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    part = st.one_of(
        st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20),
        st.lists(st.integers(0, 300), max_size=20),  # special tokens and single bytes
        st.text(max_size=10).map(lambda text: tokenizer.encode(text, False)),
    )
    ids = [number for ids in data.draw(st.lists(part, max_size=4)) for number in ids]
    stream = tokenizer.detokenizer(skip_special)
    pushed = [stream.push(number) for number in ids]
    assert "".join(pushed) + stream.flush() == tokenizer.decode(ids, skip_special)
    kept = [i for i in ids if not (skip_special and i in tokenizer.special_ids)]
    whole = b"".join(map(tokenizer.token_bytes, kept))
    if tokenizer.strips_space:
        whole = whole.removeprefix(b" ")
    assert tokenizer.decode(ids, skip_special) == whole.decode("utf-8", "replace")


@PROPERTY
@given(ids=st.lists(st.integers(0, 49_151), max_size=20))
def test_byte_level_ids_decode_as_the_library_decodes_them(
    default: Tokenizer, ids: list[int]
) -> None:
    assert default.decode(ids) == default._backend.decode(ids)


def test_a_character_appears_when_its_last_byte_does(default: Tokenizer) -> None:
    ids = default.encode("🙂")
    assert len(ids) > 1
    stream = default.detokenizer()
    assert [stream.push(number) for number in ids] == [""] * (len(ids) - 1) + ["🙂"]
    broken = default.detokenizer()
    assert broken.push(ids[0]) + broken.flush() == "\ufffd"


def test_valid_characters_survive_next_to_invalid_bytes(sentence_piece: Tokenizer) -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert sentence_piece.decode(ids) == "é\ufffd"


def test_an_added_token_always_stands_for_its_own_text(tmp_path: Path) -> None:
    """The library would read 'é' as the spelling of the byte 0xE9."""
    tiny_files.write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("é", normalized=False)])
    tokenizer = Tokenizer(backend, Spelling(byte_level=True))
    assert tokenizer.decode(tokenizer.encode("aéb")) == "aéb"


def test_lone_surrogates_become_replacement_characters(default: Tokenizer) -> None:
    assert default.decode(default.encode("a\ud800b")) == "a\ufffdb"


def test_special_tokens_in_text_are_recognised_and_can_be_asked_for(default: Tokenizer) -> None:
    assert default.special_in("a <|im_end|> b <|endoftext|>") == [2, 0]
    assert default.special_in("nothing special") == []
    assert default.eos_ids == {0, 2}
    assert default.token_text(2) == "<|im_end|>"
    assert default.decode([2, 19556]) == "Hello"
    assert default.token_bytes(10**9) == default.token_bytes(-1) == b""
    assert len(default.vocabulary) == default.vocab_size == 49_152


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "type 'bert'; supported are: gpt2, llama"),
        ({"pre": "viking"}, "'viking' does .*; supported are: command-r, .*default"),
        ({"merges": ["no such"]}, "damaged tokenizer: .*out of vocabulary"),
        ({"merges": ["one"]}, "a merge must be two tokens"),
        ({"merges": None}, "has no tokenizer.ggml.merges; convert"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens; convert"),
        ({"token_type": [1]}, "tokens and 1 token types"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, and the vocabulary has"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tiny_files.write_vocabulary(tmp_path / "bpe.gguf", "gpt2")
    metadata = {
        **read_header(path).metadata,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }
    with pytest.raises(InputError, match=words):
        build_tokenizer(metadata, path)


def test_every_split_compiles() -> None:
    for pre, patterns in SPLITS.items():
        for pattern in patterns:
            assert pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), pre


def test_other_decoders_are_refused_by_name() -> None:
    for decoder, name in [(tokenizers.decoders.WordPiece(), "WordPiece"), (None, "none")]:
        with pytest.raises(InputError, match=f"decodes with {name}; supported are byte-level"):
            Spelling.of(decoder, "tokenizer.json")


def test_spelling_is_read_off_the_published_decoders() -> None:
    sequence = json.loads(
        '{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, '
        '"content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, '
        '{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}'
    )
    decoder = tokenizers.decoders.Decoder
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    described = json.loads(backend.to_str()) | {"decoder": sequence}
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    assert isinstance(backend.decoder, decoder)
    assert Spelling.of(backend.decoder, "x") == Spelling(byte_level=False, strip_space=True)
    assert Spelling.of(tokenizers.decoders.ByteLevel(), "x") == Spelling(byte_level=True)


TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def write_gemma_like(directory: Path) -> tuple[Tokenizer, Tokenizer]:
    """One vocabulary, shaped like Gemma 3's, as ``tokenizer.json`` and as GGUF: no space put before a
    text, runs of spaces and line ends that count as words, two tokens that end a generation."""
    pieces, scores, types = tiny_files.sentence_piece_tokenizer()
    pieces[:3] = ["<unk>", "<bos>", "<eos>"]
    extra = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n"]
    first = len(pieces)
    pieces, types = pieces + extra, [*types, 3, 3, 4, 4]
    scores = scores + [-1000.0] * len(extra)
    writer = gguf.GGUFWriter(directory / "words.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TURNS)
    tiny_files._finish(writer)
    path = directory / "words.gguf"
    ours = build_tokenizer(read_header(path).metadata, path)
    backend = ours._backend
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = TURNS
    made.save_pretrained(directory)
    assert backend.token_to_id("<end_of_turn>") == first + 1
    return ours, read_tokenizer(directory, {"eos_token_id": [2, first + 1]}, {})


def test_a_vocabulary_like_gemmas_works_from_both_kinds_of_file(tmp_path: Path) -> None:
    from_gguf, from_json = write_gemma_like(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": " hello the world "},
        {"role": "assistant", "content": "hello\n\nin"},
        {"role": "user", "content": "é世"},
    ]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    for ours in (from_gguf, from_json):
        for text in [
            "hello world",
            " the  in\n\n\non",
            "<start_of_turn>user\nhello<end_of_turn>\n",
            "",
        ]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text, False), False) == text
        assert ours.encode_chat(messages) == chat
        assert chat.count(ours.bos_id) == 1
        assert ours.eos_ids == {2, theirs.convert_tokens_to_ids("<end_of_turn>")}
