r"""AR-distillation: aligns the window's first position only, as if the drafter were a next-token model.

.. math::
    L = -\,\mathbb{E}_{s,\, x \sim P} \big[ \log q_1(x_1 \mid s) \big]

Up to a constant this is the forward divergence of :math:`q_1` from the target's next-token law. The later rows never
reach the head. A window whose first label is unknown takes no part.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.objectives.base import Windows
from specdiff.objectives.frozen_head import score_type
from specdiff.objectives.path import WeightedObjective
from specdiff.objectives.prefixes import reference_rows


def ar_distillation_reference(log_q: Tensor, known: Tensor) -> Tensor:
    """Return [] the loss by a loop, in float64 (`log_q` and `known` are [A, G])."""
    first = [row[0] for row, row_known in reference_rows(log_q, known) if row_known[0]]
    return -sum(first, log_q.new_zeros((), dtype=torch.float64)) / max(len(first), 1)


@final
@dataclass(frozen=True, kw_only=True)
class ArDistillation(WeightedObjective):
    """Cross-entropy of the first position."""

    name: ClassVar[str] = "ar_distillation"

    def row_weights(self, windows: Windows) -> Tensor:
        """Return [A, G] one over the number of known first labels in the first column, 0 elsewhere."""
        weights = torch.zeros_like(windows.known, dtype=score_type(windows.hidden))
        weights[:, 0] = windows.known[:, 0]
        return weights / weights.sum().clamp_min(1.0)
