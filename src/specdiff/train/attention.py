"""Attention of the packed training pass: a causal context and many draft windows that branch off it.

A packed row of the batch is ``T`` context tokens followed by ``A`` windows of ``W`` rows. Who sees whom:

    context_causal       a context row sees context rows up to itself
    window_sees_prefix   a window row sees the context before its anchor
    window_sees_itself   a window row sees all rows of its own window

Nothing else: the context never sees a window, and no window sees another. The anchor (the last committed token) is
fed again as the window's first row, as it is when drafting.

`dense_mask` writes these terms down as one square mask. `blockwise_attention` gives the same result without it: context
rows take plain causal attention, and window rows take scores against the context and against their own window only.

Shape legend: B batch, T context rows, A windows, W window rows, S = T + A * W, Q attention heads, K key-value heads,
G = Q / K, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "specdiff_windows"


@dataclass(frozen=True, kw_only=True)
class WindowLayout:
    """Where the windows of a packed pass hang.

    Attributes:
        anchors: [B, A] int64, context index of each window's last committed token.
        num_context: T.
        window: W.
        prefix_bias: [B, 1, A, 1, T] additive, 0 where a window sees a context row.
        causal_bias: [T, T] additive, 0 where a context row sees another.
    """

    anchors: Tensor
    num_context: int
    window: int
    prefix_bias: Tensor
    causal_bias: Tensor

    @classmethod
    def build(cls, anchors: Tensor, num_context: int, window: int, dtype: torch.dtype) -> WindowLayout:
        """Make a layout and the bias its attention needs.

        Args:
            anchors: [B, A] int64 context indices.
            num_context: context rows (padding included).
            window: rows of a window.
            dtype: dtype of the attention scores.

        Returns:
            The layout.
        """
        key = torch.arange(num_context, device=anchors.device)
        hidden = key >= anchors[..., None]  # [B, A, T]
        bias = torch.zeros(hidden.shape, dtype=dtype, device=anchors.device)
        bias.masked_fill_(hidden, torch.finfo(dtype).min)
        causal = torch.full((num_context, num_context), torch.finfo(dtype).min, dtype=dtype, device=anchors.device)
        return cls(
            anchors=anchors,
            num_context=num_context,
            window=window,
            prefix_bias=bias[:, None, :, None],
            causal_bias=causal.triu_(1),
        )

    def position_ids(self) -> Tensor:
        """Return [B, S] absolute positions: the context's own, then ``anchor + offset`` for each window."""
        context = torch.arange(self.num_context, device=self.anchors.device).expand(self.anchors.shape[0], -1)
        offsets = torch.arange(self.window, device=self.anchors.device)
        windows = (self.anchors[..., None] + offsets).flatten(1)
        return torch.cat([context, windows], dim=1)


def dense_mask(layout: WindowLayout, dtype: torch.dtype) -> Tensor:
    """Return the whole pass's mask, term by term: the readable form, and the one to test against.

    Args:
        layout: where the windows hang.
        dtype: floating dtype of the mask.

    Returns:
        [B, 1, S, S] additive mask.
    """
    anchors, num_context, window = layout.anchors, layout.num_context, layout.window
    size = num_context + anchors.shape[1] * window
    row = torch.arange(size, device=anchors.device)
    in_context = row < num_context
    window_of = torch.div(row - num_context, window, rounding_mode="floor")  # negative in the context
    prefix_end = anchors[:, window_of.clamp_min(0)]  # [B, S]

    context_causal = in_context[:, None] & in_context[None, :] & (row[None, :] <= row[:, None])
    window_sees_prefix = ~in_context[:, None] & in_context[None, :] & (row[None, None, :] < prefix_end[:, :, None])
    window_sees_itself = ~in_context[:, None] & ~in_context[None, :] & (window_of[:, None] == window_of[None, :])

    allowed = context_causal | window_sees_prefix | window_sees_itself  # [B, S, S]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: WindowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend blockwise, in the form of a transformers attention function.

    Args:
        module: the attention layer.
        query: [B, Q, S, E].
        key: [B, K, S, E].
        value: [B, K, S, E].
        attention_mask: used only without a layout.
        scaling: factor on the scores.
        dropout: used only without a layout; windows train without dropout.
        layout: where the windows hang; None falls back to plain sdpa, so the same model can also draft.
        **kwargs: handed on to the fallback.

    Returns:
        [B, S, Q, E] and None (no attention weights).
    """
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    num_context = layout.num_context
    context = _context_attention(query[:, :, :num_context] * scale, key, value, layout)
    windows = _window_attention(query[:, :, num_context:] * scale, key, value, layout)
    return torch.cat([context, windows], dim=1), None


def _context_attention(query: Tensor, key: Tensor, value: Tensor, layout: WindowLayout) -> Tensor:
    """Attend causally within the context: [B, T, Q, E].

    Written out because the backward pass of fused causal attention is the slower one on a CPU at these lengths.
    """
    num_context, num_heads = layout.num_context, query.shape[1]
    num_kv = key.shape[1]
    query = query.unflatten(1, (num_kv, num_heads // num_kv)).flatten(2, 3)  # B K GT E
    scores = torch.matmul(query, key[:, :, :num_context].transpose(-1, -2)).unflatten(2, (-1, num_context))
    weights = torch.softmax(scores + layout.causal_bias, dim=-1).flatten(2, 3)
    output = torch.matmul(weights, value[:, :, :num_context]).unflatten(2, (-1, num_context))  # B K G T E
    return output.flatten(1, 2).transpose(1, 2)


def _window_attention(query: Tensor, key: Tensor, value: Tensor, layout: WindowLayout) -> Tensor:
    """Attend from window rows to their prefix and to their own window: [B, A * W, Q, E]."""
    num_context, window = layout.num_context, layout.window
    batch, num_heads, num_rows, head_dim = query.shape
    num_kv, num_windows = key.shape[1], num_rows // window
    group = num_heads // num_kv

    # Fold the heads that share a key into the rows, so that each key is read once.
    query = query.unflatten(1, (num_kv, group)).unflatten(3, (num_windows, window))  # B K G A W E
    query = query.permute(0, 1, 3, 2, 4, 5).reshape(batch, num_kv, num_windows, group * window, head_dim)
    context_key, own_key = key[:, :, :num_context], key[:, :, num_context:].unflatten(2, (num_windows, window))
    context_value, own_value = value[:, :, :num_context], value[:, :, num_context:].unflatten(2, (num_windows, window))

    to_context = torch.matmul(query.flatten(2, 3), context_key.transpose(-1, -2)).unflatten(2, (num_windows, -1))
    to_own = torch.matmul(query, own_key.transpose(-1, -2))  # B K A GW W
    scores = torch.cat([to_context + layout.prefix_bias, to_own], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_context, on_own = weights.split([num_context, window], dim=-1)
    output = torch.matmul(on_context.flatten(2, 3), context_value).unflatten(2, (num_windows, -1))
    output = output + torch.matmul(on_own, own_value)
    output = output.unflatten(3, (group, window)).permute(0, 2, 4, 1, 3, 5)  # B A W K G E
    return output.reshape(batch, num_rows, num_heads, head_dim)


def register_window_attention() -> str:
    """Make the blockwise attention known to transformers (harmless if done twice).

    Returns:
        The name to give to ``set_attn_implementation``.
    """
    AttentionInterface.register(ATTENTION_NAME, blockwise_attention)
    return ATTENTION_NAME
