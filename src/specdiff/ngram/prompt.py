"""A scorer that has read nothing but the prompt and what was committed since."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdiff.checking import integer


class PromptScorer:
    """Suffix counts of one text with interpolated Witten-Bell back-off, learning as the text grows.

    p(w | h) = (c(h w) + t(h) p(w | h without its first id)) / (c(h) + t(h)), where c counts what followed h in the
    text, and t(h) is the number of different ids that did; below the empty h lies 1 / V. So every id has a probability
    above 0, and those of all V ids add up to 1.

    Source: I. Witten and T. Bell, "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), 1991,
    method C; the recursion as in Chen and Goodman, TR-10-98, section 2.5.

    Args:
        vocab_size: V. order: longest n-gram counted. tokens: the text so far. name: used in records.

    Raises:
        InputError: V or the order is below 1.
    """

    def __init__(
        self, *, vocab_size: int, order: int = 4, tokens: Sequence[int] = (), name: str = "ngram-prompt"
    ) -> None:
        self.order = integer("order", order, 1, remedy="4 is usual")
        self.vocab_size = integer("vocab_size", vocab_size, 1, remedy="give the target's")
        self.name = name
        self._recent: tuple[int, ...] = ()  # the last order - 1 ids
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._totals: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add ids to the end of the text: constant time each."""
        counts, totals, recent = self._counts, self._totals, self._recent
        for token in tokens:
            for start in range(len(recent) + 1):
                context = recent[start:]
                followers = counts.setdefault(context, {})
                followers[token] = followers.get(token, 0) + 1
                totals[context] = totals.get(context, 0) + 1
            recent = (*recent, token)[-self.order + 1 :] if self.order > 1 else ()
        self._recent = recent

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `specdiff.ngram.base.NgramScorer.log_probs`. The context need not be the text's end."""
        key = tuple(context[1 - self.order :]) if self.order > 1 else ()
        levels: list[tuple[dict[int, int], int, float]] = []  # followers, how many differ, 1 / (count + those)
        for start in range(len(key), -1, -1):
            followers = self._counts.get(key[start:])
            if followers is None:
                break  # a longer suffix did not occur either
            kinds = len(followers)
            levels.append((followers, kinds, 1.0 / (self._totals[key[start:]] + kinds)))
        found: list[float] = []
        for token in tokens:
            p = 1.0 / self.vocab_size
            for followers, kinds, scale in levels:
                p = (followers.get(token, 0) + kinds * p) * scale
            found.append(math.log(p))
        return found
