r"""Streak distillation (SpecDiff-2, arXiv 2511.00606, Eq. 6): the expected length of the accepted streak.

.. math::
    L = -\,\mathbb{E}_{s,\, x \sim P} \Big[ \sum_{j=1}^{\gamma} \prod_{k \le j} q_k(x_k \mid s) \Big]

The product is the probability that a draft drawn from the marginals starts with :math:`x_1 \dots x_j`, so the sum is
the expected number of leading draft tokens that agree with the target's text. Its gradient is a weighted cross-entropy,

.. math::
    \nabla L = -\sum_k w_k \nabla \log q_k(x_k), \qquad w_k = \sum_{m \ge k} \prod_{i \le m} q_i(x_i),

which is nearly flat while q is poor. An unknown label (draft vocabulary lacks it, or the text ended) ends the streak:
q is 0 from there on.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import prefix_log_products, reference_rows


def streak(log_q: Tensor, known: Tensor) -> Tensor:
    """Return the streak loss of each window.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.

    Returns:
        [A] minus the expected streak, in [-G, 0].
    """
    return -prefix_log_products(log_q, known).exp().sum(dim=-1)


def streak_reference(log_q: Tensor, known: Tensor) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    for row, row_known in reference_rows(log_q, known):
        loss, product = row.new_zeros(()), row.new_ones(())
        for k in range(row.numel()):
            product = product * row[k].exp() if row_known[k] else row.new_zeros(())
            loss = loss - product
        losses.append(loss)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class Streak(PathObjective):
    """The streak loss, q inside the product."""

    name: ClassVar[str] = "streak"

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `streak`."""
        return streak(scores.log_q, scores.known)
