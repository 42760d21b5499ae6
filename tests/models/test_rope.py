"""Rotary frequencies, against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ebbtide.errors import InputError
from ebbtide.models.rope import rope_config, with_factors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0},
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2},
        YARN | {"attention_factor": 1.25},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
        YARN | {"truncate": False},
    ],
    ids=str,
)
def test_scaled_frequencies_are_those_of_transformers(
    scaling: dict[str, Any], head_dim: int, base: float
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters={**scaling, "rope_theta": base},
    )
    expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = rope_config(base, head_dim, 131_072, scaling)
    assert list(rope.inverse_frequencies) == expected.tolist()
    assert rope.attention_scale == pytest.approx(scale, rel=1e-12)


def test_plain_frequencies_are_those_of_transformers() -> None:
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = rope_config(10_000.0, 64, 2048)
    assert list(rope.inverse_frequencies) == rotary.inv_freq.tolist()
    assert rope.attention_scale == 1.0


def test_factors_from_a_gguf_file_divide_the_frequencies() -> None:
    """The converter stores, for Llama 3, by how much each frequency is stretched."""
    plain = rope_config(500_000.0, 128, 131_072)
    scaled = rope_config(500_000.0, 128, 131_072, LLAMA3)
    factors = torch.tensor(plain.inverse_frequencies) / torch.tensor(scaled.inverse_frequencies)
    assert with_factors(plain, factors).inverse_frequencies == pytest.approx(
        scaled.inverse_frequencies, rel=1e-6
    )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported; these are: default, dynamic"),
        ({"rope_type": "linear"}, "lacks its parameter 'factor'"),
        ({"rope_type": "linear", "factor": "two"}, "has a bad parameter"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "a part of the head"),
    ],
)
def test_what_is_not_known_is_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        rope_config(10_000.0, 64, 2048, scaling)
