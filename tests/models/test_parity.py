"""The same tokens as an independent implementation of the same architectures, in float32."""

from __future__ import annotations

import pytest
import torch

from ebbtide.core.params import SamplingParams

from .harness import Driver, config_of, tiny

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "qwen3-mixed", "smollm3"]
LENGTHS = (1, 15, 16, 17, 97, 131)
OUTPUT = 12


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request):
    """The model, and per prompt its greedy tokens and their log-probabilities."""
    model = tiny(request.param)
    answers = []
    with torch.inference_mode():
        for prompt in prompts(model.config.vocab_size):
            tokens, logprobs = list(prompt), []
            for _ in range(OUTPUT):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(0)[tokens[-1]]))
            answers.append((tokens[len(prompt) :], logprobs))
    return model, answers


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_greedy_tokens_and_logprobs_equal_transformers(reference, chunk, block_size):
    """All prompts together: prefill chunks and decodes of the others share the steps."""
    model, answers = reference
    driver = Driver(config_of(model), model.state_dict(), block_size)
    sampling = SamplingParams(temperature=0.0, logprobs=2).with_defaults({})
    requests = [driver.add(p, sampling) for p in prompts(model.config.vocab_size)]
    driver.run(requests, chunk, OUTPUT)
    driver.close()
    for request, (tokens, logprobs) in zip(requests, answers, strict=True):
        assert request.output == tokens
        got = [entry.logprob for entry in request.logprobs]
        assert got == pytest.approx(logprobs, abs=1e-3)
