"""How likely a drafted node is to be accepted, learnt from the text at hand.

The drafter's own probability of a path is a claim. It is wrong by a factor that depends on the text: a drafter that was
trained on arithmetic is overconfident in a story. So nodes are sorted into bins by their claim, and each bin's rate is
what was seen there, with the prior counting as ``weight`` observations and the past fading. Bins learn slowly; so they
are scaled by how the last rounds' accepted tokens compare to what was expected, and a change of text shows within a few
rounds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

EDGES = tuple(math.log(p) for p in (0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.92))
"""Between bins of log probability; one bin more than edges."""


def claimed() -> tuple[float, ...]:
    """The rates of a drafter that is right about itself: each bin's middle."""
    edges = (math.log(0.001), *EDGES, 0.0)
    return tuple(math.exp((a + b) / 2) for a, b in itertools.pairwise(edges))


@dataclass
class Calibration:
    """Acceptance rate by the drafter's claim.

    Args:
        prior: [bins] rates to start from (those of ``specdiff tune``, or `claimed`).
        weight: observations that the prior counts for in each bin.
        keep: share of what was seen that is kept after each round (0.995: half of it fades in some 140 rounds).
        steady: accepted tokens that count for the bins as they are beside those of the last rounds.
        recent: share of the last rounds that is kept after each one.
    """

    prior: tuple[float, ...]
    weight: float = 12.0
    keep: float = 0.995
    steady: float = 4.0
    recent: float = 0.9

    def __post_init__(self) -> None:
        self._expected = self._accepted = 0.0
        self._seen = [0.0] * len(self.prior)
        self._hits = [0.0] * len(self.prior)

    @property
    def trust(self) -> float:
        """How the last rounds compare to what the bins promised; 1 = as expected."""
        return (self._accepted + self.steady) / (self._expected + self.steady)

    def rate(self, score: float) -> float:
        """Probability that a node of this score (natural log of its path's probability) is accepted."""
        return self.rates()[bisect.bisect_right(EDGES, score)]

    def rates(self) -> list[float]:
        """Of every bin, the last rounds left out."""
        return [
            (hits + self.weight * prior) / (seen + self.weight)
            for hits, seen, prior in zip(self._hits, self._seen, self.prior, strict=True)
        ]

    def expected(self, scores: Sequence[float]) -> list[float]:
        """Accepted tokens to expect from the first node, the first two, ... of a draft: sums of the nodes' rates."""
        trust, rates, sums, total = self.trust, self.rates(), [], 0.0
        for score in scores:
            total += min(1.0, trust * rates[bisect.bisect_right(EDGES, score)])
            sums.append(total)
        return sums

    def observe(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Count a round: the nodes' scores, and which of them were accepted."""
        rates = self.rates()
        promised = sum(rates[bisect.bisect_right(EDGES, score)] for score in scores)
        self._expected = self.recent * self._expected + promised
        self._accepted = self.recent * self._accepted + len(accepted)
        self._seen = [self.keep * v for v in self._seen]
        self._hits = [self.keep * v for v in self._hits]
        hits = set(accepted)
        for node, score in enumerate(scores):
            at = bisect.bisect_right(EDGES, score)
            self._seen[at] += 1
            self._hits[at] += node in hits
