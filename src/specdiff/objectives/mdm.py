r"""Masked-diffusion cross-entropy with a random masking rate (the MDM loss).

.. math::
    L = \frac{1}{N} \sum_a \frac{1}{t_a} \sum_{k :\, m_{a,k} = 1} -\log q_k(x_{a,k} \mid s, x_{a,\, m = 0}),
    \qquad t_a \sim U(t_{\min}, 1), \quad m_{a,k} \sim \mathrm{Bernoulli}(t_a)

with :math:`N` the number of known labels, hidden or not, so that neither the pattern nor the model moves the divisor
and the expected loss is the bound's. The pattern comes from `specdiff.objectives.masking.draw_masking`; whoever packs
the batch shows the drafter the visible tokens. At rate 1 this is whole-window cross-entropy with equal weights. Visible
tokens and unknown labels are not scored; the rows after them are.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.objectives.base import Windows
from specdiff.objectives.frozen_head import score_type
from specdiff.objectives.masking import Masking
from specdiff.objectives.path import WeightedObjective


def mdm_reference(log_q: Tensor, known: Tensor, masking: Masking) -> Tensor:
    """Return [] the loss by loops, in float64 (`log_q` and `known` are [A, G])."""
    loss, count = log_q.new_zeros((), dtype=torch.float64), 0
    for a in range(log_q.shape[0]):
        for k in range(log_q.shape[1]):
            if bool(known[a, k]):
                count += 1
                if bool(masking.masked[a, k]):
                    loss = loss - log_q[a, k].double() / float(masking.rate[a])
    return loss / max(count, 1)


@final
@dataclass(frozen=True, kw_only=True)
class Mdm(WeightedObjective):
    """Cross-entropy of the hidden tokens, weighted by one over the masking rate."""

    name: ClassVar[str] = "mdm"
    needs_masking: ClassVar[bool] = True

    def row_weights(self, windows: Windows) -> Tensor:
        """Return [A, G] the masking's weights over the number of known labels."""
        assert windows.masking is not None  # `check` has seen to it
        weights = windows.masking.weights(score_type(windows.hidden)).to(windows.hidden.device)
        return weights / windows.known.sum().clamp_min(1)
