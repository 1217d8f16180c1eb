"""The packed training pass: one forward over a batch's context and all its windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff.train.attention import WindowLayout, dense_mask

if TYPE_CHECKING:
    from specdiff.models.denoiser import BlockCausalDenoiser
    from specdiff.train.windows import WindowBatch


def packed_window_states(
    denoiser: BlockCausalDenoiser,
    batch: WindowBatch,
    *,
    features: Tensor | None = None,
    shown: Tensor | None = None,
    dense: bool = False,
) -> Tensor:
    """Return the states of every window row of a batch.

    Equal to drafting each window on its own (prefix causal and cached, then the window), but the context is shared.

    Args:
        denoiser: the model; unless `dense`, its attention must be the one of
            `specdiff.train.attention.register_window_attention`.
        batch: B rows with T context tokens and A windows each.
        features: [B, T, F * H] target hidden states of the context, for denoisers with feature layers.
        shown: [B, A, W] bool, the window tokens that are fed in place of a mask, where the text has them; None = none.
        dense: use the square mask instead of the blockwise attention.

    Returns:
        [B, A, W, H] states after the final norm; W is the denoiser's window.
    """
    batch_size, num_context = batch.context.shape
    num_windows, window = batch.anchors.shape[1], denoiser.window
    rows = batch.last_tokens.new_zeros(batch_size, num_windows, window)
    rows[..., 0] = batch.last_tokens
    masked = torch.ones_like(rows, dtype=torch.bool)
    masked[..., 0] = False
    if shown is not None:  # the row after the anchor's is token 0, and the last token is no row
        visible = (shown & batch.reached)[..., :-1]
        rows[..., 1:] = batch.following[..., :-1] * visible
        masked[..., 1:] = ~visible
    tokens = torch.cat([batch.context, rows.flatten(1)], dim=1)
    is_mask = torch.cat([torch.zeros_like(batch.context, dtype=torch.bool), masked.flatten(1)], dim=1)
    if features is not None:  # the target has not seen the windows' rows
        padding = features.new_zeros(batch_size, num_windows * window, features.shape[2])
        features = torch.cat([features, padding], dim=1)
    embeds = denoiser.embed(tokens, is_mask, features)
    layout = WindowLayout.build(batch.anchors, num_context, window, embeds.dtype)
    if dense:
        hidden = denoiser.hidden(embeds, dense_mask(layout, embeds.dtype), layout.position_ids())
    else:
        hidden = denoiser.hidden(embeds, None, layout.position_ids(), layout=layout)
    return hidden[:, num_context:].unflatten(1, (num_windows, window))
