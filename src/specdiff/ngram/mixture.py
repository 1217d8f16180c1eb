"""Two scorers as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdiff.checking import real
from specdiff.ngram.base import Learner, NgramScorer


class InterpolatedScorer:
    """p = weight * p of the first + (1 - weight) * p of the second: a text's own habits and those of a corpus, say.

    Args:
        first, second: the parts. weight: of the first, in (0, 1). name: used in records; default made of theirs.

    Raises:
        InputError: the weight is not in (0, 1).
    """

    def __init__(self, first: NgramScorer, second: NgramScorer, *, weight: float = 0.5, name: str = "") -> None:
        remedy = "use one of them alone for a weight of 0 or 1"
        self.weight = real("weight", weight, lambda w: 0.0 < w < 1.0, expected="a number in (0, 1)", remedy=remedy)
        self._parts = (first, second)
        self.order = max(first.order, second.order)
        self.name = name or f"{first.name}+{second.name}"
        self._logs = (math.log(self.weight), math.log1p(-self.weight))

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `specdiff.ngram.base.NgramScorer.log_probs`."""
        (first, second), (one, other) = self._parts, self._logs
        pairs = zip(first.log_probs(context, tokens), second.log_probs(context, tokens), strict=True)
        found: list[float] = []
        for a, b in pairs:
            a, b = a + one, b + other
            high, low = (a, b) if a > b else (b, a)
            found.append(high + math.log1p(math.exp(low - high)))
        return found

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell the parts that learn from the text."""
        for part in self._parts:
            if isinstance(part, Learner):
                part.extend(tokens)
