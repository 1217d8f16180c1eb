r"""Streak distillation in its stop-gradient form: cross-entropy, weighted by the chance that the row is reached.

.. math::
    L = -\sum_{j=1}^{\gamma} \mathrm{sg}\Big[ \prod_{i < j} q_i(x_i \mid s) \Big] \, \log q_j(x_j \mid s)

with the weight detached (:math:`\mathrm{sg}`). The first row always weighs 1, so the gradient is not flat where q is
poor; but a row gets no credit for the tokens behind it. An unknown label ends the streak: it is not scored, and q is 0
from there on, so that nothing after it is scored either.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import alive, prefix_log_products, reference_rows, weighted_nll


def streak_stop_gradient(log_q: Tensor, known: Tensor) -> Tensor:
    """Return the stop-gradient streak loss of each window.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.

    Returns:
        [A], not negative.
    """
    products = prefix_log_products(log_q, known).detach().exp()
    before = torch.cat([torch.ones_like(products[:, :1]), products[:, :-1]], dim=-1)
    return weighted_nll(before, log_q, alive(known))


def streak_stop_gradient_reference(log_q: Tensor, known: Tensor) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    for row, row_known in reference_rows(log_q, known):
        loss, reached = row.new_zeros(()), 1.0
        for k in range(row.numel()):
            if not row_known[k] or reached == 0.0:
                break
            loss = loss - reached * row[k]
            reached *= float(row[k].detach().exp())
        losses.append(loss)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class StreakStopGradient(PathObjective):
    """Cross-entropy weighted by the detached chance of reaching the row."""

    name: ClassVar[str] = "streak_stop_gradient"

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `streak_stop_gradient`."""
        return streak_stop_gradient(scores.log_q, scores.known)
