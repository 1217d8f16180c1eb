"""A back-off model in dictionaries: no dependency, good for tests and small models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdiff.ngram.base import UNK
from specdiff.ngram.table import Floats, Ids, NgramTable

_CACHED = 1 << 14  # contexts


class MemoryScorer:
    """Evaluates a table by backing off, in float64.

    Building takes a few microseconds and some 150 bytes an n-gram; what backs off is kept for the last contexts, so a
    candidate costs one or two dictionary look-ups.

    Args:
        table: the model. name: used in records.
    """

    def __init__(self, table: NgramTable, *, name: str = "ngram-memory") -> None:
        self.order, self.name = table.order, name
        self._unigrams: dict[int, float] = dict(
            zip(table.grams[0][:, 0].tolist(), table.log_probs[0].tolist(), strict=True)
        )
        self._unknown = self._unigrams[UNK]
        self._followers: dict[tuple[int, ...], dict[int, float]] = {(): self._unigrams}
        self._backoffs: dict[tuple[int, ...], float] = {}
        for grams, log_probs in zip(table.grams[1:], table.log_probs[1:], strict=True):
            self._add(grams, log_probs)
        for grams, backoffs in zip(table.grams, table.backoffs, strict=False):
            kept = backoffs != 0.0
            contexts: list[list[int]] = grams[kept].tolist()
            self._backoffs.update(zip(map(tuple, contexts), backoffs[kept].tolist(), strict=True))
        self._chains: dict[tuple[int, ...], list[tuple[dict[int, float], float]]] = {}

    def _add(self, grams: Ids, log_probs: Floats) -> None:
        """Group the n-grams of one length by context; those of one context mostly stand together."""
        if not len(grams):
            return
        changes = np.flatnonzero((grams[1:, :-1] != grams[:-1, :-1]).any(axis=1)) + 1
        bounds = [0, *changes.tolist(), len(grams)]
        contexts = map(tuple, grams[bounds[:-1], :-1].tolist())
        words, values = grams[:, -1].tolist(), log_probs.tolist()
        for context, low, high in zip(contexts, bounds, bounds[1:], strict=False):
            self._followers.setdefault(context, {}).update(zip(words[low:high], values[low:high], strict=True))

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `specdiff.ngram.base.NgramScorer.log_probs`."""
        key = tuple(context[1 - self.order :]) if self.order > 1 else ()
        chain = self._chains.get(key)
        if chain is None:
            if len(self._chains) >= _CACHED:
                self._chains.clear()
            chain = self._chains[key] = self._chain(key)
        if len(chain) == 1:  # only words are known after this context
            followers, weight = chain[0]
            unknown = self._unknown
            return [weight + followers.get(token, unknown) for token in tokens]
        found: list[float] = []
        for token in tokens:
            for followers, weight in chain:
                value = followers.get(token)
                if value is not None:
                    found.append(weight + value)
                    break
            else:
                found.append(chain[-1][1] + self._unknown)
        return found

    def _chain(self, context: tuple[int, ...]) -> list[tuple[dict[int, float], float]]:
        """What follows the context and its suffixes, the longest first, with what backing off to there costs."""
        context = tuple(token if token in self._unigrams else UNK for token in context)
        chain: list[tuple[dict[int, float], float]] = []
        weight = 0.0
        for start in range(len(context) + 1):
            suffix = context[start:]
            if followers := self._followers.get(suffix):
                chain.append((followers, weight))
            weight += self._backoffs.get(suffix, 0.0)
        return chain
