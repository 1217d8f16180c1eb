r"""Streak for K drafts: the expected depth to which the target's text runs in a trie of K independent draws.

.. math::
    L = -\sum_{j=1}^{\gamma} \Big[ 1 - (1 - P_j)^K \Big], \qquad P_j = \prod_{k \le j} q_k(x_k \mid s)

Each of K drafts drawn from the marginals starts with :math:`x_1 \dots x_j` with probability :math:`P_j`, independently;
the bracket is the probability that at least one does, that is, that the prefix is a path of the merged trie. It is
exact for the sampled trees of self-selection and multi-round acceptance, and a smooth stand-in for a best-first tree of
about :math:`K` leaves. :math:`K = 1` is streak.

Its gradient is streak's with each prefix's part multiplied by :math:`K (1 - P_m)^{K-1}`:

.. math::
    \nabla L = -\sum_k w_k \nabla \log q_k(x_k), \qquad w_k = \sum_{m \ge k} K (1 - P_m)^{K-1} P_m .

A prefix that the trie already holds for sure pulls no more, which leaves its mass to be spread, and a rare one pulls up
to K times as hard as under streak. For one position with labels from p the stationary point has
:math:`p(x) (1 - q(x))^{K-1}` equal for all tokens in use: several tokens share the mass, the more the larger K, where
streak would put it all on one.

An unknown label ends the streak: q is 0 from there on.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.checking import integer
from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import prefix_log_products, reference_rows


def sampled_streak(log_q: Tensor, known: Tensor, *, drafts: int = 8) -> Tensor:
    """Return the K-draft streak loss of each window.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.
        drafts: K.

    Returns:
        [A] minus the expected depth, in [-G, 0].
    """
    absent = (1.0 - prefix_log_products(log_q, known).exp()).clamp_min(0.0)  # rounding may leave P a hair above 1
    return -(1.0 - absent.pow(drafts)).sum(dim=-1)


def sampled_streak_reference(log_q: Tensor, known: Tensor, *, drafts: int = 8) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    for row, row_known in reference_rows(log_q, known):
        loss, product = row.new_zeros(()), row.new_ones(())
        for k in range(row.numel()):
            product = product * row[k].exp() if row_known[k] else row.new_zeros(())
            no_draft = row.new_ones(())
            for _ in range(drafts):
                no_draft = no_draft * (1.0 - product)
            loss = loss - (1.0 - no_draft)
        losses.append(loss)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class SampledStreak(PathObjective):
    """Streak of the best of K independent drafts.

    Attributes:
        drafts: K, how many drafts are drawn; 1 gives streak.
    """

    name: ClassVar[str] = "sampled_streak"

    drafts: int = 8

    def __post_init__(self) -> None:
        """Reject fewer than one draft."""
        integer("drafts", self.drafts, 1, remedy="give the number of drafts the rule will draw")

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `sampled_streak`."""
        return sampled_streak(scores.log_q, scores.known, drafts=self.drafts)
