"""Interpolated modified Kneser-Ney smoothing, estimated from sequences of token ids.

Source of the formulas: S. Chen and J. Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling",
1998 (TR-10-98, section 3 on modified Kneser-Ney), with the conventions for ``<s>``, ``</s>`` and ``<unk>`` of K.
Heafield, I. Pouzyrevsky, J. Clark and P. Koehn, "Scalable Modified Kneser-Ney Language Model Estimation", ACL 2013
(KenLM's lmplz).

Each sequence is read as ``<s> x_1 ... x_m </s>``. With N the order and c(.) how often an n-gram occurs:

* Adjusted counts: a(w_1..w_n) = c(w_1..w_n) for n = N and where w_1 = ``<s>``; otherwise the number of different words
  v with c(v w_1..w_n) > 0.
* Discounts of length n, with t_k the number of n-grams with a = k (``<s>`` itself left out):
  D_k = k - (k + 1) t_1 / (t_1 + 2 t_2) t_{k+1} / t_k for k = 1, 2, 3; D_3 also for all larger counts.
* u(w | h) = (a(h w) - D(a(h w))) / sum_x a(h x), and the back-off weight b(h) = sum_x D(a(h x)) / sum_x a(h x).
* p(w | h) = u(w | h) + b(h) p(w | h without its first word), down to p(w) = u(w) + b() / V, with V the number of
  different words, ``</s>`` and ``<unk>`` counted, ``<s>`` not. So p(``<unk>``) = b() / V.

Where a text is too small or too regular for D_1 to D_3 (a t_k is 0, or a D_k not in (0, k]), that length takes the
discounts 0.5, 1, 1.5, those of lmplz's ``--discount_fallback``. Any D_k in (0, k] makes the law a proper one: what the
discounts take away is what b gives back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdiff.checking import integer
from specdiff.errors import InputError
from specdiff.ngram.base import BOS, EOS, UNK
from specdiff.ngram.table import BOS_LOG_PROB, Floats, NgramTable

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts of a length whose counts of counts give none."""

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and of how much in all (None = unknown)."""

_Ints = NDArray[np.int64]
_BOS, _EOS, _FIRST = 0, 1, 2  # words as they are numbered here: <s>, </s>, then the token ids in their order
_REPORT = 1000  # sequences between two reports


@dataclass(frozen=True, kw_only=True)
class Discounts:
    """What is taken off the counts of one length of n-grams.

    Attributes:
        amounts: D_1, D_2 and D_3 (for 3 and more). fallback: they are `FALLBACK`, for the text gives none.
    """

    amounts: tuple[float, float, float]
    fallback: bool


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A model and how it came about.

    Attributes:
        table: the model. discounts: of each length, the shortest first.
        sequences, tokens: read, ``<s>`` and ``</s>`` not counted.
    """

    table: NgramTable
    discounts: tuple[Discounts, ...]
    sequences: int
    tokens: int


@dataclass(frozen=True)
class _Level:
    """The different n-grams of one length, ordered by prefix, then last word.

    Attributes:
        prefix: [count] index of the n-gram without its last word, among those one shorter.
        suffix: [count] index of the n-gram without its first word, likewise.
        word: [count] last word. begins: [count] whether the first word is <s>. count: [count] occurrences.
    """

    prefix: _Ints
    suffix: _Ints
    word: _Ints
    begins: NDArray[np.bool_]
    count: _Ints


def estimate(sequences: Iterable[Sequence[int]], *, order: int = 3, progress: Progress | None = None) -> Estimate:
    """Estimate a model of the module's kind.

    Some 100 bytes a token and length are needed at once.

    Args:
        sequences: token ids of each text. order: N >= 1. progress: told of stages.

    Raises:
        InputError: the order is below 1, there is no token, or an id is not an integer in [0, 2^31).
    """
    integer("order", order, 1, remedy="3 is usual")
    report = progress or _silent
    ids, ends = _read(sequences, report)
    known, dense = np.unique(ids, return_inverse=True)
    vocabulary = np.concatenate(([BOS, EOS], known)).astype(np.int32)
    text, left = _marked(dense.astype(np.int64) + _FIRST, ends)
    report("counting", 0, order)
    levels: list[_Level] = []
    for level in _levels(text, left, order, len(vocabulary)):
        levels.append(level)
        report("counting", len(levels), order)
    adjusted = [
        np.where(here.begins, here.count, np.bincount(longer.suffix, minlength=len(here.word)))
        for here, longer in itertools.pairwise(levels)
    ] + [levels[-1].count]
    adjusted[0][_BOS] = 0  # <s> is never predicted
    discounts = tuple(_discounts(a) for a in adjusted)
    table = _weigh(levels, adjusted, discounts, vocabulary, report)
    return Estimate(table=table, discounts=discounts, sequences=len(ends), tokens=len(ids))


def _silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


def _read(sequences: Iterable[Sequence[int]], report: Progress) -> tuple[_Ints, _Ints]:
    """All ids one after the other, and where each sequence ends."""
    parts: list[_Ints] = []
    ends: list[int] = []
    total = 0
    for number, sequence in enumerate(sequences):
        try:
            part = np.asarray(sequence if len(sequence) else np.empty(0, np.int64))
            if part.ndim != 1 or part.dtype.kind not in "iu":
                raise TypeError
        except (TypeError, ValueError) as error:
            raise InputError.of(
                f"sequences[{number}]", expected="token ids", got=sequence, remedy="give a sequence of integers"
            ) from error
        if part.size and not (part.min() >= 0 and part.max() < 2**31):
            raise InputError.of(
                f"sequences[{number}]", expected="ids in [0, 2^31)", got=(int(part.min()), int(part.max())),
                remedy="give a tokenizer's ids",
            )  # fmt: skip
        parts.append(part.astype(np.int64))
        total += part.size
        ends.append(total)
        if number % _REPORT == 0:
            report("reading", number, None)
    if not total:
        raise InputError.of("sequences", expected="at least one token", got="none", remedy="give a text that has some")
    report("reading", len(parts), len(parts))
    return np.concatenate(parts), np.array(ends, np.int64)


def _marked(dense: _Ints, ends: _Ints) -> tuple[_Ints, _Ints]:
    """The text with <s> and </s> around each sequence, and how many words of its sequence each position has left."""
    lengths = np.diff(ends, prepend=0) + 2
    stops = np.cumsum(lengths)
    text = np.empty(stops[-1], np.int64)
    inner = np.ones(stops[-1], np.bool_)
    inner[stops - lengths] = inner[stops - 1] = False
    text[stops - lengths], text[stops - 1], text[inner] = _BOS, _EOS, dense
    return text, np.asarray(np.repeat(stops, lengths) - np.arange(stops[-1]), np.int64)


def _levels(text: _Ints, left: _Ints, order: int, size: int) -> Iterable[_Level]:
    """The n-grams of each length, the shortest first; those of length 1 are the words themselves, in their order.

    An n-gram is known by the index of its prefix and its last word, so a length costs one sort of 64-bit keys.
    """
    starts = np.arange(len(text))
    index = np.zeros(len(text) + 1, np.int64)  # of the n-gram one shorter at each position
    begins = text == _BOS
    for n in range(1, order + 1):
        starts = starts[left[starts] >= n]
        key = index[starts] * size + text[starts + n - 1]
        unique, first, inverse, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        at = starts[first]
        yield _Level(unique // size, index[at + 1], unique % size, begins[at], count.astype(np.int64))
        index = np.zeros_like(index)
        index[starts] = inverse


def _discounts(adjusted: _Ints) -> Discounts:
    t = [int(np.count_nonzero(adjusted == k)) for k in range(5)]
    if not all(t[1:4]):
        return Discounts(amounts=FALLBACK, fallback=True)
    y = t[1] / (t[1] + 2 * t[2])
    one, two, three = (k - (k + 1) * y * t[k + 1] / t[k] for k in (1, 2, 3))
    if not (0 < one <= 1 and 0 < two <= 2 and 0 < three <= 3):
        return Discounts(amounts=FALLBACK, fallback=True)
    return Discounts(amounts=(one, two, three), fallback=False)


def _weigh(
    levels: Sequence[_Level],
    adjusted: Sequence[_Ints],
    discounts: Sequence[Discounts],
    vocabulary: NDArray[np.int32],
    report: Progress,
) -> NgramTable:
    """Probabilities and back-off weights, from the shortest n-grams to the longest."""
    words = len(vocabulary)  # with <s>, without <unk>: as many as without <s>, with <unk>
    grams = [np.append(vocabulary, np.int32(UNK))[:, None]]
    probs: list[Floats] = []
    backoffs: list[Floats] = []
    for n, (level, counts, discount) in enumerate(zip(levels, adjusted, discounts, strict=True), start=1):
        taken = np.array([0.0, *discount.amounts])[np.minimum(counts, 3)]
        if n == 1:
            total = float(counts.sum())
            unknown = float(taken.sum()) / total / words
            p = np.append((counts - taken) / total + unknown, unknown)
            p[_BOS] = 10.0**BOS_LOG_PROB
        else:
            shorter = len(probs[-1])  # with <unk> where they are words; it is no prefix of anything
            sums = np.bincount(level.prefix, weights=counts, minlength=shorter)
            loose = np.bincount(level.prefix, weights=taken, minlength=shorter)
            followed = sums > 0
            weight = np.divide(loose, sums, out=np.ones(shorter), where=followed)
            p = (counts - taken) / sums[level.prefix] + weight[level.prefix] * probs[-1][level.suffix]
            backoffs.append(np.log(weight))
            last = vocabulary[level.word]
            grams.append(np.concatenate((grams[-1][level.prefix], last[:, None]), axis=1))
        probs.append(p)
        report("smoothing", n, len(levels))
    return NgramTable(
        grams=tuple(grams), log_probs=tuple(np.minimum(np.log(p), 0.0) for p in probs), backoffs=tuple(backoffs)
    )
