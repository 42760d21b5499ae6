"""Drives an executor with plans made by hand: blocks in sequence, no scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ebbtide.core.plan import Row, StepOutcome, StepPlan, Table, Transfer, TransferResult
from ebbtide.models.config import ModelConfig, RopeConfig
from ebbtide.models.executor import TorchExecutor
from ebbtide.models.kv import KVMemory, layout_for
from ebbtide.models.llama import LlamaModel
from ebbtide.models.packed import Quantized
from ebbtide.params import SamplingParams

torch.set_num_threads(1)  # tiny models: a second thread only costs

GREEDY = SamplingParams(temperature=0.0).with_defaults({})
SIZES = {
    "vocab_size": 307,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # sharp enough that a wrong KV entry changes tokens
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# A group of sliding layers that is padded, scores scaled by another number than the head size's root,
# and two rotations that differ in base and in scaling.
GEMMA3 = {
    "num_hidden_layers": 5,
    "initializer_range": 0.15,  # its embeddings are scaled up
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 37,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def tiny(architecture: str) -> transformers.PreTrainedModel:
    """A small random model of the family, in float32, the same every time."""
    builders = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=40),
        "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24),
        "qwen3-mixed": lambda: transformers.Qwen3Config(
            **SIZES,
            head_dim=24,
            use_sliding_window=True,
            sliding_window=33,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        ),
        "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 1, 0]),
        "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES | GEMMA3),
    }
    torch.manual_seed(20260101)
    config = builders[architecture]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("norm.weight", ".bias")
        ):  # ones and zeros by default: would hide mistakes
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def rope_of(parameters: Mapping[str, Any], head_dim: int) -> RopeConfig:
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = parameters["rope_theta"] ** -powers / parameters.get("factor", 1.0)
    return RopeConfig(tuple(frequencies.tolist()))


def weights_of(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights as Ebbtide keeps them: norms as they are multiplied with."""
    gemma = model.config.model_type == "gemma3_text"
    return {
        name: weight + 1 if gemma and name.endswith("norm.weight") else weight
        for name, weight in model.state_dict().items()
    }


def config_of(model: transformers.PreTrainedModel) -> ModelConfig:
    """The model's configuration as Ebbtide says it."""
    hf = model.config
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    gemma: dict[str, Any] = {}
    ropes = hf.rope_parameters
    if hf.model_type == "gemma3_text":
        gemma = {
            "window_rope": rope_of(ropes["sliding_attention"], head_dim),
            "post_norms": True,
            "activation": "gelu_tanh",
            "embedding_scale": hf.hidden_size**0.5,
            "query_scale": (head_dim / hf.query_pre_attn_scalar) ** 0.5,
        }
        ropes = ropes["full_attention"]
    layers = hf.num_hidden_layers
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    weights = model.state_dict()
    attention = "model.layers.0.self_attn."
    return ModelConfig(
        architecture=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_eps=hf.rms_norm_eps,
        max_length=hf.max_position_embeddings,
        rope=rope_of(ropes, head_dim),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        rope_layers=tuple(map(bool, getattr(hf, "no_rope_layers", None) or [1] * layers)),
        qkv_bias=f"{attention}q_proj.bias" in weights,
        output_bias=f"{attention}o_proj.bias" in weights,
        qk_norm=f"{attention}q_norm.weight" in weights,
        tied_embeddings=bool(hf.tie_word_embeddings),
        **gemma,
    )


@dataclass
class Request:
    """tokens: prompt, then output. fed: positions whose KV is written, or will be by what is in flight."""

    id: str
    tokens: list[int]
    sampling: SamplingParams
    prompt: int
    tables: tuple[Table, ...]
    fed: int = 0
    logprobs: list[object] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class Driver:
    """An executor, a block allocator that only counts, and the requests it feeds."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        block_size: int = 16,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        failing: Iterable[int] = (),
        model: LlamaModel | None = None,
    ) -> None:
        self.layout = layout_for(config, block_size, dtype)
        self.kv = KVMemory(self.layout, num_blocks, "cpu")
        self.model = model or LlamaModel(config, weights, self.layout)
        self.loads: list[Transfer] = []
        self._failing = set(failing)
        self.executor = TorchExecutor(self.model, self.kv, self._load)
        self._next_block = 0
        self._step = 0
        self.requests: list[Request] = []

    def _load(self, transfer: Transfer) -> TransferResult:
        self.loads.append(transfer)
        return TransferResult(transfer, "unreadable" if transfer.id in self._failing else "")

    def add(self, tokens: Iterable[int], sampling: SamplingParams = GREEDY) -> Request:
        prompt = list(tokens)
        tables = tuple(Table(0, []) for _ in self.layout.groups)
        request = Request(f"request-{len(self.requests)}", prompt, sampling, len(prompt), tables)
        self.requests.append(request)
        return request

    def row(self, request: Request, length: int) -> Row:
        """The request's next ``length`` positions; grows its tables and lets windows slide."""
        start, end = request.fed, request.fed + length
        size = self.layout.block_size
        tables = []
        for spec, (first, blocks) in zip(self.layout.groups, request.tables, strict=True):
            while (first + len(blocks)) * size < end:
                blocks.append(self._next_block)
                self._next_block += 1
            gone = spec.first_visible(start) // size - first
            tables.append(Table(first + gone, blocks[gone:]) if gone > 0 else Table(first, blocks))
        request.tables = tuple(tables)
        request.fed = end
        known = len(request.tokens)
        samples = end >= known
        return Row(
            request.id,
            request.tokens,
            known,
            start,
            end,
            request.tables,
            request.sampling if samples else None,
            end - request.prompt if samples else 0,
        )

    def plan(self, rows: list[Row], loads: Iterable[Transfer] = ()) -> StepPlan:
        self._step += 1
        return StepPlan(self._step, rows, list(loads), sum(row.end - row.start for row in rows))

    def apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        by_id = {request.id: request for request in self.requests}
        tokens = iter(outcome.tokens)
        for i, row in enumerate(plan.rows):
            if row.sampling is not None:
                by_id[row.request_id].tokens.append(next(tokens))
            if i in outcome.logprobs:
                by_id[row.request_id].logprobs.append(outcome.logprobs[i])

    def run(self, requests: Iterable[Request], chunk: int, max_tokens: int) -> None:
        """Feed everything, ``chunk`` prompt tokens of each request per step, until all are done."""
        requests = list(requests)
        while True:
            active = [r for r in requests if len(r.output) < max_tokens]
            if not active:
                return
            rows = [self.row(r, min(chunk, len(r.tokens) - r.fed)) for r in active]
            plan = self.plan(rows)
            self.apply(plan, self.executor.submit(plan).result())

    def close(self) -> None:
        self.executor.close()


def quantized(kind: str, rows: int, columns: int, seed: int) -> Quantized:
    """For formats with blocks of 256, eight times as many columns."""
    rng = np.random.default_rng(seed)
    if kind.endswith("_K"):  # which the package reads, but does not write
        blocks = rows * columns // 32
        raw = rng.integers(0, 256, (blocks, {"Q4_K": 144, "Q5_K": 176}[kind]), np.uint8)
        raw[:, :4] = rng.uniform(0.001, 0.004, (blocks, 2)).astype(np.float16).view(np.uint8)
        return Quantized(raw.reshape(-1), kind, (rows, columns * 8))
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    values += 0.3  # so that minimums are not near -8 scales
    return Quantized(gguf.quantize(values, Kind[kind]).reshape(-1), kind, (rows, columns))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, over all values."""
    return float((found.double() - exact).norm() / exact.norm())
