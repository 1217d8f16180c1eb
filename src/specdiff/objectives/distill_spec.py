r"""DistillSpec for diffusion drafters: the mean over positions of a divergence between whole rows.

.. math::
    L = \frac{1}{N} \sum_{a,k} \mathrm{Div}\big( p(\cdot \mid s_a, x_{a,<k}), \; q_k(\cdot \mid s_a) \big)

over the :math:`N` rows that the text reaches, with the target's row on the path it wrote and the divergences of
`specdiff.objectives.divergences`. Every position counts alike, whether or not those before it would be accepted: that
is what streak distillation improves on.

Rows come in chunks, from both sides: the target's are asked for by number, so they may be made from its states as they
are needed (`frozen_head_rows`), and neither side ever has logits of more than a chunk. A row whose label the draft
vocabulary lacks still has a target row, and is compared where `Windows.reached` says so; without it, only rows with a
known label are. One unknown label does not touch the rows after it.

Shape legend: A windows, G rows of a window, R rows, H hidden size, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.base import Objective, TargetRows, WindowLoss, Windows
from specdiff.objectives.divergences import DIVERGENCES
from specdiff.objectives.frozen_head import one_sweep, score_type


def frozen_head_rows(
    states: Tensor, head_weight: Tensor, draft_vocab: Tensor | None = None, *, temperature: float = 1.0
) -> TargetRows:
    """Make the target's rows from its states, chunk by chunk.

    Args:
        states: [A, G, H] the target's states that predict each window row's token.
        head_weight: [V, H] its output head.
        draft_vocab: [D] target ids of the draft columns; None where they are the same.
        temperature: of the target.

    Returns:
        A function from row numbers to log-probabilities of the draft columns, normalised over V.
    """
    if not 0.0 < temperature < float("inf"):
        raise InputError.of(
            "temperature",
            expected="a number > 0",
            got=temperature,
            remedy="at 0 there are no rows to match; use streak",
        )
    flat = states.detach().flatten(0, 1)

    def rows(numbers: Tensor) -> Tensor:
        logits = (flat[numbers] @ head_weight.T).to(score_type(states)) / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        return log_p if draft_vocab is None else log_p[:, draft_vocab]

    return rows


@final
@dataclass(frozen=True, kw_only=True)
class DistillSpec(Objective):
    """Mean divergence between the target's and the drafter's rows.

    Attributes:
        divergence: one of `specdiff.objectives.divergences.DIVERGENCES`.
    """

    name: ClassVar[str] = "distill_spec"
    needs_target: ClassVar[bool] = True

    divergence: str = "tv"

    def __post_init__(self) -> None:
        """Reject an unknown divergence."""
        if self.divergence not in DIVERGENCES:
            raise InputError.of(
                "divergence",
                expected="one of " + ", ".join(DIVERGENCES),
                got=self.divergence,
                remedy="choose one; the ratio rule's acceptance is 1 - tv",
            )

    def loss(self, windows: Windows, *, chunk: int = 512) -> WindowLoss:
        """See `Objective.loss`."""
        self.check(windows, chunk)
        target, divergence = windows.target, DIVERGENCES[self.divergence]
        assert target is not None  # `check` has seen to it
        reached = windows.known if windows.reached is None else windows.reached
        numbers = reached.flatten().nonzero()[:, 0]
        labels = windows.labels.flatten()[numbers]
        count, head = max(numbers.numel(), 1), windows.head_weight

        def chunk_loss(hidden: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
            log_q = torch.log_softmax((hidden @ head.T).to(score_type(hidden)), dim=-1)
            with torch.no_grad():
                log_p = target(numbers[part]).to(log_q.dtype)
                if log_p.shape != log_q.shape:
                    raise InputError.of(
                        "target",
                        expected=f"rows of shape {tuple(log_q.shape)}",
                        got=tuple(log_p.shape),
                        remedy="give log-probabilities of the draft columns",
                    )
                label, known = labels[part].clamp_min(0), labels[part] >= 0
                picked = torch.where(known, log_q.gather(1, label[:, None])[:, 0], 0.0)
                correct = known & (log_q.argmax(dim=-1) == label)
            return divergence(log_p, log_q).sum() / count, picked, correct

        flat = windows.hidden.flatten(0, 1)
        loss, picked, correct = one_sweep(flat[numbers], chunk_loss, chunk)
        shape = windows.labels.shape
        return WindowLoss(
            loss=loss,
            log_q=picked.new_zeros(flat.shape[0]).index_copy(0, numbers, picked).view(shape),
            correct=correct.new_zeros(flat.shape[0]).index_copy(0, numbers, correct).view(shape),
            scored=windows.known & reached,
        )
