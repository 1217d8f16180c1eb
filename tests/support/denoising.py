"""The inference form of a denoiser, spelt out: a mask by hand, for what `CachedDecoder` does in production."""

from __future__ import annotations

import torch
from torch import Tensor


def block_causal_mask(
    num_cached: int, num_prefix: int, window: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the additive mask of a draft pass: new prefix rows causal, window rows full.

    Args:
        num_cached: prefix rows already in the cache (C).
        num_prefix: prefix rows fed in this pass, before the window; may be 0.
        window: window rows; 0 for a pass that only fills the cache.
        dtype: floating dtype of the mask.
        device: where to put it.

    Returns:
        [1, 1, num_prefix + window, num_cached + num_prefix + window], 0 where a row may look and the dtype's lowest
        value elsewhere.
    """
    query = torch.arange(num_prefix + window, device=device)[:, None] + num_cached
    key = torch.arange(num_cached + num_prefix + window, device=device)[None, :]
    causal = key <= query
    from_window = query >= num_cached + num_prefix
    mask = torch.zeros(causal.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~(causal | from_window), torch.finfo(dtype).min)[None, None]
