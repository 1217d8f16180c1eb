"""Linear layers whose weights are kept in the layout that the CPU's matrix kernels read.

On CPUs a plain row-major weight is laid out anew inside every product with few rows, which is most of a decode step's
time. oneDNN can do it once. The products are those of the same kernels, so nothing but time changes; it costs a second
copy of the weights. Measured: docs/results.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdiff.machine import memory

_DTYPES = (torch.bfloat16, torch.float32)
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
_ROWS = 16  # the layout is the same for any number of rows; the op asks for a hint
_SHARE = 0.5  # of the memory that is free, at most, for the copies


class PrepackedLinear(nn.Linear):
    """An `nn.Linear` that multiplies with a packed copy of its weight wherever no gradient is asked for.

    Its parameters, state dict and gradients are those of the plain layer. The copy is made at the first product, and
    again whenever the weight was changed (but by writing into ``weight.data``, which torch itself cannot see either).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        weight = self.weight
        fits = input.dtype == weight.dtype and input.dtype in _DTYPES and input.device.type == "cpu"
        if torch.is_grad_enabled() or not fits or not input.numel():
            return super().forward(input)
        version = (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
        packed = self.__dict__.get("_packed")
        if packed is None or packed[0] != version:
            packed = (version, pack(weight))
            self.__dict__["_packed"] = packed
        return multiply(input, packed[1], self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the copy out of what is pickled or deep-copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


def pack(weight: Tensor) -> Tensor:
    """Return an opaque copy of a weight [O, I] for `multiply`."""
    with torch.inference_mode():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def multiply(input: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [..., O] = input [..., I] times a packed weight, plus a bias [O]."""
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this machine has kernels for packed weights of this dtype and device."""
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS):
        return False
    return weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack(module: nn.Module) -> int:
    """Turn the plain linear layers on the CPU into packed ones, in place, if there is memory for the copies.

    Layers of any other class (quantised, split over devices, with hooks of accelerate) stay as they are.

    Returns:
        How many were turned.
    """
    layers = list(_plain_layers(module))
    needed = sum(weight.nbytes for weight in {id(x.weight): x.weight for x in layers}.values())
    if needed > _SHARE * free_memory():
        return 0
    for layer in layers:
        layer.__class__ = PrepackedLinear  # in place, so that names, hooks and shared parameters stay
    return len(layers)


def is_prepacked(module: nn.Module) -> bool:
    """Whether some layer of a model is packed."""
    return any(isinstance(m, PrepackedLinear) for m in module.modules())


def free_memory() -> float:
    """Bytes that can be had without swapping; infinity where the system does not say."""
    available = memory()[1]
    return float("inf") if available is None else available


def _plain_layers(module: nn.Module) -> Iterator[nn.Linear]:
    for layer in module.modules():
        if type(layer) is nn.Linear and not hasattr(layer, "_hf_hook"):
            linear = cast(nn.Linear, layer)
            if type(linear.weight) is nn.Parameter and can_pack(linear.weight):  # quantised and split ones are not
                yield linear
