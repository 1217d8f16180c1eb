r"""D-PACE (arXiv 2605.18810): cross-entropy weighted by what a row is worth to the streak, smoothed.

.. math::
    L = -\sum_{k=1}^{\gamma} \mathrm{sg}[w_k] \, \log q_k(x_k \mid s), \qquad
    w_k = \sum_{m \ge k} \prod_{i \le m} \big( (1 - a) \, q_i(x_i \mid s) + a \big)

At :math:`a = 0` its gradient is the streak's; at :math:`a = 1` it is cross-entropy with weights falling linearly,
:math:`\gamma + 1 - k`. In between, rows behind a poor one keep some weight, so training starts where streak is flat.
With normalisation, each window's weights are divided by their sum over the scored rows, which makes all windows count
alike and is no longer the streak's gradient at :math:`a = 0`.

An unknown label ends the streak: it is not scored, and its factor is 0 (not :math:`a`), so that nothing from there on
is scored or lends weight to the rows before.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.checking import flag, real
from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import alive, known_log_q, reference_rows, weighted_nll


def d_pace(log_q: Tensor, known: Tensor, *, smoothing: float = 0.5, normalise: bool = False) -> Tensor:
    """Return the D-PACE loss of each window.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.
        smoothing: a, in [0, 1].
        normalise: whether each window's weights are made to sum to 1.

    Returns:
        [A], not negative.
    """
    scored = alive(known)
    factors = (1.0 - smoothing) * known_log_q(log_q.detach(), scored).exp() + smoothing
    products = torch.where(scored, factors, 0.0).cumprod(dim=-1)
    weights = products.flip(-1).cumsum(dim=-1).flip(-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return weighted_nll(weights, log_q, scored)


def d_pace_reference(log_q: Tensor, known: Tensor, *, smoothing: float = 0.5, normalise: bool = False) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    for row, row_known in reference_rows(log_q, known):
        length = row_known.index(False) if False in row_known else len(row_known)
        weights: list[float] = []
        for k in range(length):
            weight = 0.0
            for m in range(k, length):
                product = 1.0
                for i in range(m + 1):
                    product *= (1.0 - smoothing) * float(row[i].detach().exp()) + smoothing
                weight += product
            weights.append(weight)
        if normalise and sum(weights) > 0:
            weights = [weight / sum(weights) for weight in weights]
        loss = row.new_zeros(())
        for k, weight in enumerate(weights):
            if weight > 0:
                loss = loss - weight * row[k]
        losses.append(loss)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class DPace(PathObjective):
    """Cross-entropy with detached, smoothed streak weights.

    Attributes:
        smoothing: a, in [0, 1]; 0 gives the streak's gradient.
        normalise: whether each window's weights are made to sum to 1.
    """

    name: ClassVar[str] = "d_pace"

    smoothing: float = 0.5
    normalise: bool = False

    def __post_init__(self) -> None:
        """Reject a smoothing out of range."""
        remedy = "0 gives the streak's gradient, 1 plain cross-entropy with falling weights"
        real("smoothing", self.smoothing, lambda x: 0 <= x <= 1, expected="a number in [0, 1]", remedy=remedy)
        flag("normalise", self.normalise, remedy="say whether each window's weights sum to 1")

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `d_pace`."""
        return d_pace(scores.log_q, scores.known, smoothing=self.smoothing, normalise=self.normalise)
