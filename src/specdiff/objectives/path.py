r"""Objectives that read log q of the path's tokens only (and perhaps each row's top few): one sweep over the head.

Two kinds. A `PathObjective` is the mean over windows of a function of the window's log q,

.. math::
    L = \frac{1}{N} \sum_a \ell(\log q_{a,1}(x_{a,1}), \dots, \log q_{a,\gamma}(x_{a,\gamma})),
    \qquad N = \#\{a : \text{some label of } a \text{ is known}\},

and a `WeightedObjective` a sum of row terms with weights that the model does not touch,
:math:`L = -\sum_{a,k} w_{a,k} \log q_{a,k}(x_{a,k})`. Rows that take no part never reach the head.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.objectives.base import IGNORED, Objective, WindowLoss, Windows
from specdiff.objectives.frozen_head import label_log_q, one_sweep


@dataclass(frozen=True, kw_only=True)
class PathScores:
    """The scores of some windows' paths.

    Attributes:
        log_q: [A, G] log q of the labels; 0 where unknown.
        known: [A, G] bool, whether the label is known.
        top: [A, G, K] each row's largest log q, falling; -inf in windows without any label.
    """

    log_q: Tensor
    known: Tensor
    top: Tensor


class PathObjective(Objective):
    """Mean over windows of a function of their log q."""

    reads_all_rows: ClassVar[bool] = False
    """Whether rows with unknown labels are scored too (their top tokens)."""

    @property
    def num_top(self) -> int:
        """K, how many of each row's largest log q it reads."""
        return 0

    @abstractmethod
    def window_losses(self, scores: PathScores) -> Tensor:
        """Return [A] the loss of each window; 0, without a gradient, for windows without a known label."""

    @final
    def loss(self, windows: Windows, *, chunk: int = 512) -> WindowLoss:
        """See `Objective.loss`."""
        self.check(windows, chunk)
        labelled = windows.known.any(dim=-1)
        read = labelled[:, None].expand_as(windows.known) if self.reads_all_rows else windows.known
        count = labelled.sum().clamp_min(1)

        def part_loss(scores: PathScores, part: slice) -> Tensor:
            return self.window_losses(scores).sum() / count

        return _score_paths(windows, read, part_loss, num_top=self.num_top, chunk=chunk)


class WeightedObjective(Objective):
    """Cross-entropy with row weights that do not depend on the model."""

    @abstractmethod
    def row_weights(self, windows: Windows) -> Tensor:
        """Return [A, G] weights, in the type of log q; what stands at unknown labels does not matter."""

    @final
    def loss(self, windows: Windows, *, chunk: int = 512) -> WindowLoss:
        """See `Objective.loss`."""
        self.check(windows, chunk)
        weights = self.row_weights(windows) * windows.known

        def part_loss(scores: PathScores, part: slice) -> Tensor:
            return -(weights[part] * scores.log_q).masked_fill(weights[part] == 0, 0.0).sum()

        return _score_paths(windows, weights != 0, part_loss, num_top=0, chunk=chunk)


def _score_paths(
    windows: Windows, read: Tensor, part_loss: Callable[[PathScores, slice], Tensor], *, num_top: int, chunk: int
) -> WindowLoss:
    """Sweep the head over the rows to be read, chunk by chunk of whole windows.

    Args:
        windows: A windows of G rows.
        read: [A, G] bool, the rows to send to the head.
        part_loss: from the scores of a slice of windows to its part of the loss.
        num_top: K.
        chunk: rows at one time.

    Returns:
        The loss and its parts.
    """
    window = windows.hidden.shape[1]
    scored = windows.known & read
    num_top = min(num_top, windows.head_weight.shape[0])

    def chunk_loss(hidden: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        shape, flat = hidden.shape[:2], hidden.flatten(0, 1)
        rows = read[part].flatten().nonzero()[:, 0]
        labels = torch.where(scored[part], windows.labels[part], IGNORED).flatten()[rows]
        found = label_log_q(flat[rows], windows.head_weight, labels, num_top=num_top, chunk=chunk)
        log_q = found.log_q.new_zeros(flat.shape[0]).index_copy(0, rows, found.log_q).view(shape)
        top = found.top.new_full((flat.shape[0], num_top), -math.inf).index_copy(0, rows, found.top)
        scores = PathScores(log_q=log_q, known=scored[part], top=top.view(*shape, num_top))
        correct = found.correct.new_zeros(flat.shape[0]).index_copy(0, rows, found.correct).view(shape)
        return part_loss(scores, part), log_q, correct

    loss, log_q, correct = one_sweep(windows.hidden, chunk_loss, max(1, chunk // window))
    return WindowLoss(loss=loss, log_q=log_q, correct=correct, scored=scored)
