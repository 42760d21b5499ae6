"""From the engine's settings to a model: device, dtype, form of the weights, kernels. PyTorch is imported
when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebbtide.engine.config import EngineConfig
from ebbtide.errors import InputError

if TYPE_CHECKING:
    from ebbtide.models.checkpoint import Checkpoint, Form
    from ebbtide.models.config import ModelConfig
    from ebbtide.models.kernels import Kernels
    from ebbtide.models.kv import KVLayout
    from ebbtide.models.llama import LlamaModel

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


def choose_device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}", "device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but this machine has no CUDA device that torch can use")
    return device


def choose_dtype(name: str, device: str) -> Any:
    """bfloat16 on GPUs and on CPUs with instructions for it, float32 elsewhere."""
    import torch

    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    if choose_device(device).type == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def choose_weights(name: str, device: Any, dtype: Any) -> tuple[Form, Any]:
    """In which form weights are held, and the dtype of those that are not packed. Packed ones are for
    products on a CPU; beside them, "auto" keeps what is faster for steps of many tokens."""
    import torch

    from ebbtide.models.checkpoint import Form

    on_cpu = device.type == "cpu"
    if name == "packed" and not on_cpu:
        raise InputError("weights=packed needs device=cpu", "weights")
    if name == "bfloat16" and dtype != torch.bfloat16:
        raise InputError("weights=bfloat16 needs dtype=bfloat16, or leave both at auto", "weights")
    if name == "packed":
        return Form.PACKED, dtype
    if name == "auto" and on_cpu:
        return Form.BOTH, dtype
    return Form.WIDE, torch.float32 if name == "float32" else dtype


def load_weights(
    config: EngineConfig, form: Form, dtype: Any, progress: Progress | None
) -> Checkpoint:
    from ebbtide.models.checkpoint import Form
    from ebbtide.models.load import load_checkpoint
    from ebbtide.models.packed import KINDS_4_BITS

    checkpoint = load_checkpoint(config.model, dtype, progress, form)
    kinds = {weight.kind for weight in checkpoint.quantized.values()}
    if form is Form.PACKED and kinds.isdisjoint(KINDS_4_BITS):
        raise InputError(
            f"weights=packed, but {checkpoint.name} has no weights in {' or '.join(KINDS_4_BITS)}: use auto",
            "weights",
        )
    return checkpoint


def choose_kernels(
    name: str, model: ModelConfig, layout: KVLayout, device: Any, dtype: Any
) -> Kernels:
    """What is computed beside large products, and how. "auto" takes compiled kernels where it can."""
    import torch

    from ebbtide.models.compiled import NoNativeKernels
    from ebbtide.models.kernels import TorchKernels
    from ebbtide.models.native import NativeFloat32Kernels, NativeKernels

    suits = device.type == "cpu" and dtype == layout.dtype
    if name == "native" and not suits:
        raise InputError(
            "kernels=native is for a CPU, and weights of the same dtype: use auto", "kernels"
        )
    if name == "torch" or not suits:
        return TorchKernels(layout, device)
    try:
        if dtype == torch.float32:
            return NativeFloat32Kernels(layout, device)
        return NativeKernels(model, layout)
    except NoNativeKernels as error:
        if name == "native":
            raise InputError(f"kernels=native, but {error}: use auto", "kernels") from error
        log.warning("computing without compiled kernels, which are faster: %s", error)
        return TorchKernels(layout, device)


def build_model(
    config: EngineConfig, checkpoint: Checkpoint, layout: KVLayout, device: Any, dtype: Any
) -> LlamaModel:
    """The model on its device. dtype: of its weights."""
    from ebbtide.models.checkpoint import Form
    from ebbtide.models.llama import LlamaModel
    from ebbtide.models.packed import KINDS_4_BITS

    kernels = choose_kernels(config.kernels, checkpoint.config, layout, device, dtype)
    if config.weights == "packed" and not kernels.packs(KINDS_4_BITS):
        raise InputError(
            "weights=packed, but nothing here multiplies with them in this dtype: in float32 it takes "
            "kernels=native, and a machine that has them; or use weights=auto",
            "weights",
        )
    return LlamaModel(
        checkpoint.config,
        checkpoint.weights,
        layout,
        device,
        checkpoint.quantized,
        dtype,
        kernels,
        also_wide=checkpoint.form is Form.BOTH,
    )
