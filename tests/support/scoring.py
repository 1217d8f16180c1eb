"""Small n-gram scorers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random


class HashScorer:
    """Some log-probability for every n-gram, always the same one; ``calls`` counts what it was asked."""

    def __init__(self, order: int = 3, *, seed: int = 0, lowest: float = 6.0) -> None:
        self.order, self.name, self.calls = order, "hash", 0
        self._seed, self._lowest = seed, lowest

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        self.calls += 1
        near = tuple(context[1 - self.order :]) if self.order > 1 else ()
        return [-self._lowest * Random(f"{self._seed} {near} {token}").random() - 0.01 for token in tokens]


class TableScorer:
    """Log-probabilities from a dictionary of n-grams; the rest has ``other``."""

    def __init__(self, table: dict[tuple[int, ...], float], *, order: int = 2, other: float = -5.0) -> None:
        self.order, self.name = order, "table"
        self._table, self._other = table, other

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        near = tuple(context[1 - self.order :]) if self.order > 1 else ()
        return [self._table.get((*near, token), self._other) for token in tokens]


class CountingScorer:
    """Learns unigrams from the text (add one, over ``size`` ids); keeps what it was told."""

    def __init__(self, size: int) -> None:
        self.order, self.name, self.text = 1, "counting", list[int]()
        self._size = size

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        total = len(self.text) + self._size
        return [math.log((self.text.count(token) + 1) / total) for token in tokens]
