"""A matrix product with fixed weights, in whatever form the device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold ``weight`` in its own blocked layout on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """``x @ weight.T + bias`` for x [rows, in], weight [out, in].

    On a CPU that computes in bfloat16 the weight is kept in oneDNN's blocked layout, repacked once:
    what PyTorch's own compiler does when it freezes a model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = can_pack(weight)
        self._bias = bias
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
        return residual + functional.linear(x, self._weight, self._bias)
