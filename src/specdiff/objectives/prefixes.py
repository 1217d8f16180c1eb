r"""What path objectives share: where a streak ends, the products of its prefixes, and sums of log q that survive -inf.

**An unknown label ends the streak**: the draft vocabulary lacks the token, or the text is over, so no draft can be
accepted there or behind. The product is 0 from the first unknown label on.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor


def alive(known: Tensor) -> Tensor:
    """Return [A, G] bool: whether this label and all before it are known (`known` is [A, G] bool)."""
    return known.cumprod(dim=-1).bool()


def known_log_q(log_q: Tensor, known: Tensor) -> Tensor:
    """Return [A, G] log q with 0 (and no gradient) where the label is unknown, whatever stood there."""
    return torch.where(known, log_q, torch.zeros_like(log_q))


def prefix_log_products(log_q: Tensor, known: Tensor) -> Tensor:
    r"""Return the log of each prefix's product, :math:`S_j = \sum_{k \le j} \log q_k(x_k)`.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.

    Returns:
        [A, G]; -inf from the first unknown label on, without a gradient there.
    """
    sums = known_log_q(log_q, known).cumsum(dim=-1)
    return torch.where(alive(known), sums, -math.inf)


def weighted_nll(weights: Tensor, log_q: Tensor, known: Tensor) -> Tensor:
    """Return the sums of -weight * log q over known labels; a weight of 0 gives 0 even against log q = -inf.

    Args:
        weights: [A, G] weights; their gradient is stopped here.
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.

    Returns:
        [A].
    """
    weights = weights.detach()
    return -(weights * known_log_q(log_q, known & (weights != 0))).sum(dim=-1)


def mean_nll(log_q: Tensor, known: Tensor) -> Tensor:
    """Return [A] -log q of each window's known labels, summed and divided by G (`log_q` and `known` are [A, G])."""
    return -known_log_q(log_q, known).sum(dim=-1) / log_q.shape[-1]


def reference_rows(log_q: Tensor, known: Tensor) -> Iterator[tuple[Tensor, list[bool]]]:
    """Yield each window's [G] log q in float64 and its flags, for the slow references to loop over."""
    flags = cast("list[list[bool]]", known.tolist())  # pyright: ignore[reportUnknownMemberType]
    yield from zip(log_q.double(), flags, strict=True)
