"""Rotary frequencies and their scaling: what position p turns pair i of a head by, per position.

Everything is computed in float32 with torch, in the same order as Hugging Face transformers does
(``modeling_rope_utils``), since a last-bit difference in a frequency grows with the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ebbtide.errors import InputError
from ebbtide.models.config import RopeConfig


def rope_config(
    base: float, head_dim: int, max_length: int, scaling: Mapping[str, Any] | None = None
) -> RopeConfig:
    """``base``: theta of RoFormer (arXiv 2104.09864, section 3.2.2). ``scaling``: the keys of Hugging
    Face's ``rope_scaling`` / ``rope_parameters``; ``rope_type`` chooses the method.

    Raises ``InputError`` for a method that is not known or lacks a parameter.
    """
    scaling = scaling or {}
    method = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(
            f"rope scaling {method!r} is not supported; these are: {', '.join(sorted(METHODS))}"
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            "rotary embeddings over a part of the head are not supported "
            f"(partial_rotary_factor is {scaling['partial_rotary_factor']})"
        )
    if head_dim < 2 or head_dim % 2:
        raise InputError(
            f"rotary embeddings need an even number of values per head, not {head_dim}"
        )
    try:
        frequencies, scale = METHODS[method](base, head_dim, max_length, scaling)
    except KeyError as error:
        raise InputError(f"rope scaling {method!r} lacks its parameter {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"rope scaling {method!r} has a bad parameter: {error}") from None
    return RopeConfig(tuple(frequencies.tolist()), float(scale))


def with_factors(rope: RopeConfig, factors: torch.Tensor) -> RopeConfig:
    """Divide each frequency by its factor: GGUF's ``rope_freqs.weight``, float32 [head_dim / 2]."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32) / factors.float()
    return RopeConfig(tuple(frequencies.tolist()), rope.attention_scale)


def _powers(base: float, head_dim: int) -> torch.Tensor:
    return base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _plain(
    base: float, head_dim: int, max_length: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Also ``dynamic`` (NTK-aware): up to ``max_length`` positions it changes nothing, and beyond
    them this engine does not go."""
    return 1.0 / _powers(base, head_dim), 1.0


def _linear(
    base: float, head_dim: int, max_length: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Position interpolation (arXiv 2306.15595, section 2.3)."""
    return (1.0 / _powers(base, head_dim)) / scaling["factor"], 1.0


def _llama3(
    base: float, head_dim: int, max_length: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between are blended."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    plain = 1.0 / _powers(base, head_dim)
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > trained / low, plain / factor, blended)
    return torch.where(wavelength < trained / high, plain, stretched), 1.0


def _yarn(
    base: float, head_dim: int, max_length: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2 for the frequencies, 3.4 for the attention scale)."""
    trained = scaling["original_max_position_embeddings"]
    factor = scaling["factor"]
    if factor is None:
        factor = max_length / trained

    def pair_turning(turns: float) -> float:
        """Index of the pair that turns so often within the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = pair_turning(scaling.get("beta_fast") or 32)
    high = pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    powers = _powers(base, head_dim)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_scale(factor, scaling)


def _yarn_scale(factor: float, scaling: Mapping[str, Any]) -> float:
    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims:
        return temperature(mscale) / temperature(all_dims)
    return temperature(1.0)


_Method = Callable[[float, int, int, Mapping[str, Any]], tuple[torch.Tensor, float]]

METHODS: dict[str, _Method] = {
    "default": _plain,
    "dynamic": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
