"""A matrix product with fixed weights, in whatever form the device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ebbtide.models.config import Activation
from ebbtide.models.gates import gate
from ebbtide.models.packed import PackedProduct

# oneDNN's name and algorithm of each activation.
_FUSED = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold ``weight`` in its own blocked layout on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_half(weight: Tensor, bias: Tensor | None) -> object | None:
    """``weight`` for ``quantized.linear_dynamic_fp16``: float16 weights, float32 arithmetic.

    None where the machine has no such product, or where float16 does not hold a weight. bfloat16 has
    3 bits less, so all that changes is below 6e-5, where float16 rounds to multiples of 6e-8.
    """
    fits = (
        can_pack(weight)
        and "fbgemm" in torch.backends.quantized.supported_engines
        and float(weight.abs().max()) <= torch.finfo(torch.float16).max
    )
    if not fits:
        return None
    wide = None if bias is None else bias.to(torch.float32)
    return torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32), wide)


class Linear:
    """``x @ weight.T + bias`` for x [rows, in], weight [out, in].

    On a CPU that computes in bfloat16 the weight is kept in oneDNN's blocked layout, repacked once:
    what PyTorch's own compiler does when it freezes a model. Against plain ``linear`` over the layers
    of a 135M model (2 threads): 0.6 of the time for 1 or 8 rows, 0.75 for 32, 0.88 for 1,024.

    With ``small_batches`` it is kept a second time, in float16, for x in float32: over the same
    layers 8.5 instead of 11.8 ms for 1 row, 9.2 instead of 10.4 for 4 rows, but slower from 8 rows.

    packed: the same weight as its file has it, for x of few rows; without ``weight``, for all.
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None = None,
        small_batches: bool = False,
        packed: PackedProduct | None = None,
    ) -> None:
        self._packed = packed
        self._bias = bias
        self._blocked = weight is not None and can_pack(weight)
        self._half = pack_half(weight, bias) if small_batches and weight is not None else None
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            if self._blocked
            else weight
        )

    @property
    def takes_float32(self) -> bool:
        """Whether x may be float32 where the weight is bfloat16; so is the result then."""
        return self._half is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self._half is not None and x.dtype == torch.float32:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._half)
        if self._packed is not None and self._packed.pays_for(x):
            return self._with_bias(self._packed(x))
        if self._blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        assert self._weight is not None
        return functional.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        if self._packed is not None and self._packed.pays_for(x):
            return self._with_bias(self._packed(x, residual))
        if self._blocked and x.dtype == torch.bfloat16:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
        return self(x).add_(residual)

    def _with_bias(self, product: Tensor) -> Tensor:
        return product if self._bias is None else product.add_(self._bias)


class GatedLinear:
    """``activation(x @ gate.T) * (x @ up.T)`` for x [rows, in], weights gate and up [out, in]: SwiGLU or
    GeGLU (Shazeer 2020), the latter with GELU's tanh approximation (Hendrycks and Gimpel 2016).

    In oneDNN's layout, both products carry their share of the elementwise work: for 1,024 rows of 576
    that takes 0.93 of the time of one product followed by two passes, for one row as long. Elsewhere
    the two are one product. ``small_batches``, ``packed``: as in ``Linear``; the latter holds gate, then up.
    """

    def __init__(
        self,
        weights: tuple[Tensor, Tensor] | None,
        small_batches: bool = False,
        activation: Activation = "silu",
        packed: PackedProduct | None = None,
    ) -> None:
        self._activation = activation
        self._packed = packed
        self._blocked = weights is not None and can_pack(weights[0])
        both = None if weights is None else torch.cat(weights)
        self._half = pack_half(both, None) if small_batches and both is not None else None
        self._both = None if self._blocked else both
        if weights is not None and self._blocked:
            self._gate, self._up = (
                torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) for weight in weights
            )

    @property
    def takes_float32(self) -> bool:
        """Whether x may be float32 where the weight is bfloat16; so is the result then."""
        return self._half is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self._half is not None and x.dtype == torch.float32:
            product = torch.ops.quantized.linear_dynamic_fp16(x, self._half)
        elif self._packed is not None and self._packed.pays_for(x):
            return self._packed.gated(x, self._activation)
        elif self._blocked:
            linear = torch.ops.mkldnn._linear_pointwise
            name, algorithm = _FUSED[self._activation]
            gates = linear(x, self._gate, None, name, [], algorithm)
            return linear.binary(x, gates, self._up, None, "mul")
        else:
            assert self._both is not None
            product = functional.linear(x, self._both)
        return gate(product, self._activation)
