"""A second forward pass of the published masked diffusion LMs, in plain torch, reading published weight names.

Written from the architectures (RMSNorm, rotary embedding, grouped queries, SwiGLU; biases on q, k, v in Qwen2; norms on
q and k heads in Qwen3; no causal mask), not from the code under test. Slow and obvious: one sequence, no cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """Sizes, and how the family names its weights."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    names: Mapping[str, str]
    block: int | None = None
    """Tokens of a block for block-causal attention, None for full attention."""


HUGGING_FACE = {
    "table": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "before_attention": "model.layers.{}.input_layernorm", "before_mlp": "model.layers.{}.post_attention_layernorm",
    "q": "model.layers.{}.self_attn.q_proj", "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj", "o": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm", "k_norm": "model.layers.{}.self_attn.k_norm",
    "gate": "model.layers.{}.mlp.gate_proj", "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}  # fmt: skip

LLADA = {
    "table": "model.transformer.wte", "norm": "model.transformer.ln_f", "head": "model.transformer.ff_out",
    "before_attention": "model.transformer.blocks.{}.attn_norm", "before_mlp": "model.transformer.blocks.{}.ff_norm",
    "q": "model.transformer.blocks.{}.q_proj", "k": "model.transformer.blocks.{}.k_proj",
    "v": "model.transformer.blocks.{}.v_proj", "o": "model.transformer.blocks.{}.attn_out",
    "gate": "model.transformer.blocks.{}.ff_proj", "up": "model.transformer.blocks.{}.up_proj",
    "down": "model.transformer.blocks.{}.ff_out",
}  # fmt: skip


class Reference:
    """The forward pass in float64.

    Args:
        arch: sizes and names. weights: published name -> tensor.
        norm_dtype: in which RMSNorm and the rotary angles are computed; the published code (and transformers) use
            float32 there whatever the dtype of the model is.
    """

    def __init__(
        self, arch: Architecture, weights: Mapping[str, Tensor], norm_dtype: torch.dtype = torch.float64
    ) -> None:
        self.arch, self.norm_dtype = arch, norm_dtype
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def logits(self, tokens: Tensor) -> Tensor:
        """The network's own rows [L, V] for ids [L]; row i is what the network puts out at position i."""
        x = self._weight("table")[tokens]
        for layer in range(self.arch.layers):
            x = x + self._attention(self._norm(x, "before_attention", layer), layer)
            inner = self._norm(x, "before_mlp", layer)
            gate, up = self._linear(inner, "gate", layer), self._linear(inner, "up", layer)
            x = x + self._linear(gate * torch.sigmoid(gate) * up, "down", layer)
        head = self.weights.get(self.arch.names["head"] + ".weight", self._weight("table"))
        return self._norm(x, "norm") @ head.T

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        arch, length = self.arch, x.shape[0]
        q = self._linear(x, "q", layer).reshape(length, arch.heads, arch.head_dim)
        k = self._linear(x, "k", layer).reshape(length, arch.kv_heads, arch.head_dim)
        v = self._linear(x, "v", layer).reshape(length, arch.kv_heads, arch.head_dim)
        if "q_norm" in arch.names and f"{arch.names['q_norm'].format(layer)}.weight" in self.weights:
            q, k = self._norm(q, "q_norm", layer), self._norm(k, "k_norm", layer)
        q, k = self._rotate(q), self._rotate(k)
        mixed = torch.empty_like(q)
        for head in range(arch.heads):
            group = head // (arch.heads // arch.kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(arch.head_dim)
            if arch.block is not None:
                block = torch.arange(length) // arch.block
                scores = scores.masked_fill(block[:, None] < block[None, :], -math.inf)
            mixed[:, head] = scores.softmax(dim=-1) @ v[:, group]
        return self._linear(mixed.reshape(length, -1), "o", layer)

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.arch.head_dim // 2
        exponents = torch.arange(0, self.arch.head_dim, 2, dtype=self.norm_dtype) / self.arch.head_dim
        frequencies = 1.0 / self.arch.theta**exponents
        angles = torch.arange(x.shape[0], dtype=self.norm_dtype)[:, None] * frequencies[None, :]
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, x: Tensor, name: str, layer: int = 0) -> Tensor:
        y = x.to(self.norm_dtype)
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.arch.eps)
        return self._weight(name, layer) * y.double()

    def _linear(self, x: Tensor, name: str, layer: int) -> Tensor:
        bias = self.weights.get(f"{self.arch.names[name].format(layer)}.bias")
        y = x @ self._weight(name, layer).T
        return y if bias is None else y + bias

    def _weight(self, name: str, layer: int = 0) -> Tensor:
        return self.weights[f"{self.arch.names[name].format(layer)}.weight"]
