r"""Streak with a calibration term: what the chain wants, and an honest q beside it for the tree to hedge with.

.. math::
    L = -\sum_{j=1}^{\gamma} \prod_{k \le j} q_k(x_k \mid s)
        \;+\; \frac{\lambda}{\gamma} \sum_{k=1}^{\gamma} -\log q_k(x_k \mid s)

Why. For one position with labels from :math:`p`, streak maximises :math:`\sum_x p(x) q(x)`, which is linear in q: its
maximum is a point mass on the argmax, whatever else p holds. Every second branch of a best-first tree is then chosen
among near-zeros. Cross-entropy alone gives :math:`q = p`. With :math:`\lambda` the stationary point solves
:math:`q(x) = p(x) \, (q(x) + \lambda') / C` (:math:`\lambda' = \lambda/\gamma`), that is
:math:`q(x) = \lambda' p(x) / (C - p(x))`: sharpened, but in p's order and with no token lost, towards p as
:math:`\lambda` grows.

An unknown label ends the streak (q is 0 from there on); the calibration term skips its row only, and goes on.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.checking import real
from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import mean_nll, reference_rows
from specdiff.objectives.streak import streak, streak_reference


def calibrated_streak(log_q: Tensor, known: Tensor, *, weight: float = 0.5) -> Tensor:
    """Return the calibrated streak loss of each window.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.
        weight: lambda, of the calibration term.

    Returns:
        [A].
    """
    return streak(log_q, known) + (weight * mean_nll(log_q, known) if weight else 0.0)


def calibrated_streak_reference(log_q: Tensor, known: Tensor, *, weight: float = 0.5) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    streaks = streak_reference(log_q, known)
    for loss, (row, row_known) in zip(streaks, reference_rows(log_q, known), strict=True):
        total = loss
        for k in range(row.numel()):
            if row_known[k]:
                total = total - weight / row.numel() * row[k]
        losses.append(total)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class CalibratedStreak(PathObjective):
    """Streak plus cross-entropy.

    Attributes:
        weight: lambda, of the calibration term; 0 gives streak.
    """

    name: ClassVar[str] = "calibrated_streak"

    weight: float = 0.5

    def __post_init__(self) -> None:
        """Reject a negative or infinite weight."""
        remedy = "0 gives plain streak, large values cross-entropy"
        real("weight", self.weight, lambda x: 0 <= x < float("inf"), expected="a number >= 0", remedy=remedy)

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `calibrated_streak`."""
        return calibrated_streak(scores.log_q, scores.known, weight=self.weight)
