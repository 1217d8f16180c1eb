"""The numbers of a back-off model, as arrays: what an ARPA file holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

BOS_LOG_PROB = -99.0
"""Decimal logarithm of p(<s>) in ARPA files: it is a context only, and never predicted."""


@dataclass(frozen=True, kw_only=True)
class NgramTable:
    """A back-off model: the n-grams of each length n = 1 ... order, and their weights.

    p(w | h) is that of the n-gram h w where the table has it; else it is p(w | h without its first id), times the
    back-off weight of h where the table has h. Every prefix of an n-gram is in the table too.

    Attributes:
        grams: for each n, ids [count, n]; `specdiff.ngram.base.BOS`, ``EOS`` and ``UNK`` for the three special words.
        log_probs: for each n, natural logarithms [count] of p(last id | the ids before it).
        backoffs: for each n < order, natural logarithms [count] of the back-off weight, 0 where nothing follows.
    """

    grams: tuple[Ids, ...]
    log_probs: tuple[Floats, ...]
    backoffs: tuple[Floats, ...]

    @property
    def order(self) -> int:
        """Longest n-gram."""
        return len(self.grams)

    @property
    def counts(self) -> tuple[int, ...]:
        """N-grams of each length, the shortest first."""
        return tuple(len(g) for g in self.grams)
