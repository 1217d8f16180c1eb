r"""Whole-window masked cross-entropy.

Every row of every window is scored at once, from one forward pass, against the token the target wrote there:

.. math::
    L = \frac{\sum_{a} \sum_{j=0}^{\gamma-1} w_j \, [y_{a,j} \text{ known}] \; \big(-\log q_\theta(y_{a,j} \mid
        x_{\le a})\big)}{\sum_{a} \sum_{j=0}^{\gamma-1} w_j \, [y_{a,j} \text{ known}]},
    \qquad w_j = \rho^{\,j}

with anchors :math:`a` (the last committed token), offsets :math:`j` and the token :math:`y_{a,j}` at position
:math:`a + 1 + j`. A token at offset :math:`j` only counts if all before it were accepted, so its weight decays.

Only the chosen hidden rows reach the output head, and they do so in chunks: at no time do logits of more than
``chunk`` rows exist. The head is frozen (it is the target's), so the gradient with respect to the hidden rows can be
made in the same sweep (`specdiff.objectives.frozen_head.one_sweep`), and nothing is kept for the backward pass but that
gradient.

An unknown label's row is left out; the rows after it count as before.

Shape legend: A windows, G rows of a window, R selected rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.checking import real
from specdiff.errors import InputError
from specdiff.objectives.base import IGNORED, Windows
from specdiff.objectives.frozen_head import label_log_q, one_sweep, score_type
from specdiff.objectives.path import WeightedObjective

__all__ = [
    "IGNORED",
    "MaskedCrossEntropy",
    "MaskedLoss",
    "masked_cross_entropy",
    "masked_cross_entropy_reference",
    "position_weights",
]


@dataclass(frozen=True, kw_only=True)
class MaskedLoss:
    """The loss and what it was made of.

    Attributes:
        loss: [] weighted mean, with a gradient.
        nll: [R] negative log-likelihood of each row's label; 0 where ignored. fp32 or better, no gradient.
        correct: [R] bool, whether the label is the row's most likely token; False where ignored.
    """

    loss: Tensor
    nll: Tensor
    correct: Tensor


def position_weights(window: int, decay: float = 0.8) -> Tensor:
    """Return geometric weights of the window's offsets.

    Args:
        window: number of offsets (gamma).
        decay: ratio of one weight to the one before, in (0, 1].

    Returns:
        [window] fp32, starting at 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if window < 1:
        raise InputError(f"window: expected a positive integer, got {window}")
    if not 0.0 < decay <= 1.0:
        raise InputError(f"decay: expected a number in (0, 1], got {decay}; 1 weighs all offsets alike")
    return decay ** torch.arange(window, dtype=torch.float32)


def masked_cross_entropy(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, *, chunk: int = 512
) -> MaskedLoss:
    """Return the weighted cross-entropy of selected rows, without ever holding all their logits.

    Args:
        hidden: [R, H] states of the selected rows.
        head_weight: [D, H] frozen output head.
        labels: [R] int64 columns of the head, `IGNORED` where unknown.
        weights: [R] non-negative weights.
        chunk: rows whose logits exist at one time.

    Returns:
        The loss and its parts. With no known label, or no weight, the loss is 0.

    Raises:
        ValueError: shapes do not fit, or the head asks for a gradient.
    """
    _check(hidden, head_weight, labels, weights)
    if chunk < 1:
        raise InputError(f"chunk: expected a positive integer, got {chunk}")
    weights = weights.to(score_type(hidden)).masked_fill(labels == IGNORED, 0.0)
    weights = weights / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)

    def chunk_loss(rows: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        scores = label_log_q(rows, head_weight, labels[part], chunk=chunk)
        return -(weights[part] * scores.log_q).sum(), -scores.log_q, scores.correct

    loss, nll, correct = one_sweep(hidden, chunk_loss, chunk)
    return MaskedLoss(loss=loss, nll=nll, correct=correct)


def masked_cross_entropy_reference(hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the same loss the plain way, with all logits at once; what the chunked form is tested against.

    Args:
        hidden: [R, H] states of the selected rows.
        head_weight: [D, H] output head.
        labels: [R] int64, `IGNORED` where unknown.
        weights: [R] non-negative weights.

    Returns:
        [] the loss.
    """
    _check(hidden, head_weight, labels, weights)
    log_q = torch.log_softmax((hidden @ head_weight.T).to(score_type(hidden)), dim=-1)
    known = labels != IGNORED
    nll = -log_q.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    weights = weights.to(log_q.dtype) * known
    return (weights * nll).sum() / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)


@final
@dataclass(frozen=True, kw_only=True)
class MaskedCrossEntropy(WeightedObjective):
    """Whole-window cross-entropy with weights that fall with the offset.

    Attributes:
        decay: ratio of one offset's weight to the one before, in (0, 1].
    """

    name: ClassVar[str] = "cross_entropy"

    decay: float = 0.8

    def __post_init__(self) -> None:
        """Reject a decay out of range."""
        remedy = "1 weighs all offsets alike, less favours the first"
        real("decay", self.decay, lambda x: 0 < x <= 1, expected="a number in (0, 1]", remedy=remedy)

    def row_weights(self, windows: Windows) -> Tensor:
        """Return [A, G] decaying weights that sum to 1 over the known labels."""
        weights = position_weights(windows.labels.shape[1], self.decay).to(windows.known.device) * windows.known
        weights = weights.to(score_type(windows.hidden))
        return weights / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)


def _check(hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor) -> None:
    rows = hidden.shape[0]
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise InputError(
            f"hidden and head_weight: expected [R, H] and [D, H], got {tuple(hidden.shape)} "
            f"and {tuple(head_weight.shape)}"
        )
    if labels.shape != (rows,) or weights.shape != (rows,):
        raise InputError(
            f"labels and weights: expected shape ({rows},), got {tuple(labels.shape)} and {tuple(weights.shape)}; "
            "select the same rows from each"
        )
    if head_weight.requires_grad:
        raise InputError("head_weight: expected a frozen tensor, got one that requires a gradient; detach it")
