"""EAGLE's head and its loss in float64, from the papers: no cache, no library modules, one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def forward(
    state: Mapping[str, Tensor],
    embeddings: Tensor,
    features: Tensor,
    *,
    heads: int,
    kv_heads: int,
    theta: float,
    eps: float,
) -> Tensor:
    """Predicted features [N, H]; row i has the embedding of token i + 1 and the feature of position i.

    Args:
        state: published names. embeddings, features: [N, H].
    """
    w = {name: t.double() for name, t in state.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        bias = w.get(f"{name}.bias")
        y = x @ w[f"{name}.weight"].T
        return y if bias is None else y + bias

    layer = "layers.0."
    x = linear("fc", torch.cat([embeddings.double(), features.double()], dim=-1))
    n, width = x.shape
    dim = width // heads
    angles = torch.outer(torch.arange(n).double(), theta ** (-torch.arange(0, dim, 2).double() / dim))

    def rotated(y: Tensor) -> Tensor:
        first, second = y[..., : dim // 2], y[..., dim // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    q = rotated(linear(f"{layer}self_attn.q_proj", x).view(n, heads, dim))
    k = rotated(linear(f"{layer}self_attn.k_proj", x).view(n, kv_heads, dim)).repeat_interleave(
        heads // kv_heads, dim=1
    )
    v = linear(f"{layer}self_attn.v_proj", x).view(n, kv_heads, dim).repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, width)
    x = x + linear(f"{layer}self_attn.o_proj", mixed)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{layer}post_attention_layernorm.weight"]
    gate, up = linear(f"{layer}mlp.gate_proj", normed), linear(f"{layer}mlp.up_proj", normed)
    return x + linear(f"{layer}mlp.down_proj", gate * torch.sigmoid(gate) * up)


def loss(predicted: Tensor, features: Tensor, head: Tensor, *, weight: float) -> Tensor:
    """Mean smooth L1 over positions and H, plus the weighted cross-entropy of the LM head's laws; all [N, H]."""
    error = (predicted - features).abs()
    smooth = torch.where(error < 1, error.pow(2) / 2, error - 0.5).mean()
    p = (features @ head.T).softmax(-1)
    log_q = (predicted @ head.T).log_softmax(-1)
    return smooth - weight * (p * log_q).sum() / len(p)
