"""The independent implementation that ours is compared with: transformers, with the same weights."""

from __future__ import annotations

import torch
import transformers

from ebbtide.models.checkpoint import Checkpoint


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model. Exits for architectures other than Llama's."""
    config, rope = checkpoint.config, checkpoint.config.rope
    if config.architecture != "llama" or rope.attention_scale != 1:
        raise SystemExit(f"this script knows the llama architecture, not {config.architecture}")
    theta = rope.inverse_frequencies[1] ** (-config.head_dim / 2)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_eps,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    ).to(dtype)
    missing, unexpected = model.load_state_dict(dict(checkpoint.weights), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.eval()
