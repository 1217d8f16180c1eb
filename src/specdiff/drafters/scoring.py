"""The n-gram model beside each row of a batch: one for all, or one a row that learns from its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from specdiff.errors import InputError
from specdiff.ngram.base import Learner, NgramScorer

Scoring = NgramScorer | Callable[[], NgramScorer]
"""A scorer that all rows share, or a function that makes one for each row (`specdiff.ngram.base.Learner`)."""


def check_scoring(scoring: Scoring | None) -> None:
    """Refuse what can be no scorer, and one that learns but would be shared: rows would learn from each other's texts.

    Raises:
        InputError: naming what to pass.
    """
    if scoring is None or callable(getattr(scoring, "log_probs", None)):
        if isinstance(scoring, Learner):
            raise InputError.of(
                "scorer",
                expected="a function that makes a scorer for each row, where scorers learn from the text",
                got=type(scoring).__name__,
                remedy="pass for example scorer=lambda: PromptScorer(vocab_size=...)",
            )
    elif not callable(scoring):
        raise InputError.of(
            "scorer",
            expected="an NgramScorer, a function that makes one, or None",
            got=type(scoring).__name__,
            remedy="use one of specdiff.ngram",
        )


class RowScorers:
    """The scorers of one batch.

    A scorer that learns hears each committed token once: a round costs what was committed since the last one, never a
    pass over the text, but for the first round and after a rewind.

    Args:
        scoring: see `Scoring`. rows: of the batch.
    """

    def __init__(self, scoring: Scoring, rows: int) -> None:
        shared = hasattr(scoring, "log_probs")
        self._shared = cast("NgramScorer", scoring) if shared else None
        self._make = None if shared else cast("Callable[[], NgramScorer]", scoring)
        self._own: list[NgramScorer | None] = [None] * rows
        self._read = [0] * rows

    def at(self, row: int, prefix: Tensor) -> tuple[NgramScorer, Sequence[int]]:
        """A row's scorer, up to date, and the end of the text that its scores depend on.

        Args:
            row: index of the request. prefix: [L] all committed tokens.
        """
        scorer = self._own[row] if self._shared is None else self._shared
        if scorer is None:
            assert self._make is not None
            scorer = self._own[row] = self._make()
        if self._shared is None and isinstance(scorer, Learner):
            scorer.extend(prefix[self._read[row] :].tolist())
            self._read[row] = prefix.numel()
        last = scorer.order - 1
        return scorer, prefix[-last:].tolist() if last else ()

    def rewind(self, row: int, length: int) -> None:
        """Forget a row beyond its first ``length`` tokens: counts cannot be taken back, so the text is read anew."""
        if length == 0 or self._read[row] > length:
            self._own[row], self._read[row] = None, 0
