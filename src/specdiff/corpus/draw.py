"""From a batch of logits to one token a row: each row by its own uniform, so that no row depends on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.corpus.plan import Sampling
from specdiff.sampling import SamplingOptions, check_finite, warpers


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw the next token of every row, and say how probable the target held it.

    Args:
        logits: [B, V] of the target. uniforms: [B] float64 in [0, 1); not read at temperature 0.
        sampling: temperature and top-p of the law that tokens are drawn from.

    Returns:
        Tokens [B] int64 (at temperature 0 the first of the most probable ones), and their log-probabilities [B] under
        `specdiff.corpus.row.LAW`.

    Raises:
        NumericsError: logits are NaN or infinite.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    check_finite(logits)
    if sampling.temperature == 0:
        tokens = logits.max(dim=-1).indices
    else:
        scores = logits
        for warper in warpers(SamplingOptions(temperature=sampling.temperature, top_p=sampling.top_p), logits.device):
            scores = warper(torch.empty(0), scores)  # type: ignore[arg-type]
        tokens = _inverse_cdf(torch.softmax(scores, dim=-1), uniforms.to(logits.device))
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen - torch.logsumexp(logits, dim=-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`specdiff.randomness.inverse_cdf` for a batch: weights [B, V], uniforms [B] -> indices [B]."""
    ends = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    total = ends[:, -1]
    # right: the first index whose cumulative weight EXCEEDS the threshold, so that weight zero is never drawn
    found = torch.searchsorted(ends, (total * uniforms)[:, None], right=True)[:, 0]
    # uniform * total rounded up to the total: the last index that has weight
    last = (ends < total[:, None]).sum(-1)
    return torch.minimum(found, last)
