"""The gate of an MLP: SwiGLU or GeGLU (Shazeer 2020), the latter with GELU's approximation by tanh (Hendrycks
and Gimpel 2016)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ebbtide.models.config import Activation


def gate(product: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up`` for a product [tokens, gate and up]."""
    gates, ups = product.chunk(2, dim=1)
    if activation == "silu":
        return functional.silu(gates).mul_(ups)
    return functional.gelu(gates, approximate="tanh").mul_(ups)
