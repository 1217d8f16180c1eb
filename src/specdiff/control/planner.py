"""The planner: as many nodes as pay, and no draft where none does (ours, beyond SpecDiff-2 and DiffuSpec).

Every round buys tokens with time. Once the marginals are known, a node of the best-first tree brings its probability of
being accepted (`calibration`), and costs what one more row of the target pass costs (`costs`); the tree is cut where
``expected accepted - rate * seconds`` is largest, with ``rate`` the tokens a second that the time is worth elsewhere.

Whether to draft at all is a question of an account, kept in plain steps: a round that drafts pays its time in and takes
its tokens out, a plain step earns a small interest, and only while there is credit are drafts made. So the time lost on
text that cannot be drafted is bounded by the opening credit and the interest, whatever the drafter claims; and when the
text becomes draftable, the next try finds out.

All decisions follow from the marginals, from what was accepted before and from a table measured beforehand. No clock is
read, so the same seed still gives the same tokens; and the law of the text is untouched (docs/rules.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdiff.checking import real
from specdiff.control.calibration import Calibration, claimed
from specdiff.control.costs import CostTable
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Draft, Round


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What to expect of a setting on texts like those it was tuned on.

    Attributes:
        budget: the setting. tau: tokens a target pass. speedup: over plain decoding, by the cost table. nodes: mean.
    """

    budget: Budget
    tau: float
    speedup: float
    nodes: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the planner knows of a pair before the first token; made by ``specdiff tune``.

    Attributes:
        costs: seconds of the parts of a round. prior: [bins] acceptance rates by the drafter's claim.
        greedy, sampled: the best setting at temperature 0 and above, and what it promises.
        opening, interest, limit: the account's first credit (0 for a setting that promises nothing), what a plain step
            adds, and its ceiling, in plain steps.
    """

    costs: CostTable
    greedy: Prediction
    sampled: Prediction
    prior: tuple[float, ...] = field(default_factory=claimed)
    opening: float = 2.0
    interest: float = 0.01
    limit: float = 8.0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            InputError: credit below 0, or a prior of another length than the bins.
        """
        for name in ("opening", "interest", "limit"):
            real(
                name, getattr(self, name), lambda v: 0 <= v < math.inf, expected="a number >= 0", remedy="leave it out"
            )
        if len(self.prior) != len(claimed()) or not all(0 <= rate <= 1 for rate in self.prior):
            raise InputError.of(
                "prior",
                expected=f"{len(claimed())} rates in [0, 1]",
                got=self.prior,
                remedy="measure again: specdiff tune",
            )

    def best(self, *, greedy: bool) -> Prediction:
        """The setting for a temperature."""
        return self.greedy if greedy else self.sampled

    def controller(self, budget: Budget) -> Planner:
        """A request's controller; give this method to `specdiff.decoder.Settings`, with the budget of `best`."""
        promising = any(p.budget == budget and p.speedup > 1 for p in (self.greedy, self.sampled))
        return Planner(self.costs, budget, self.prior, self.opening if promising else 0.0, self.interest, self.limit)


class Planner:
    """One request's planner.

    Args:
        costs: seconds of the parts of a round. prior: [bins] acceptance rates to start from.
        budget: gamma, shape and draft temperature of the rounds that draft; the nodes of a best-first shape are the
            most it may use, other shapes are used whole or not at all.
        opening, interest, limit: see `Plan`.
    """

    def __init__(
        self,
        costs: CostTable,
        budget: Budget,
        prior: tuple[float, ...],
        opening: float = 2.0,
        interest: float = 0.01,
        limit: float = 8.0,
    ) -> None:
        self._costs, self._budget = costs, budget
        self._context = 0  # until the first record tells
        self._interest, self._limit = interest, limit
        self._account = min(opening, limit)
        self._calibration = Calibration(prior)
        self._tokens = self._steps = 0.0  # of the drafting rounds, fading
        self._asked = False

    @property
    def account(self) -> float:
        """Credit in plain steps; drafts are made while it is above what a round without luck costs."""
        return self._account

    def budget(self, room: int) -> Budget | None:
        """The budget of the next round; None where a draft does not pay."""
        self._asked = room >= 1 and self._account >= self._stake()
        if not self._asked:
            return None
        gamma, shape = min(self._budget.gamma, room), self._budget.shape
        if isinstance(shape, BestFirst):
            shape = BestFirst(shape.nodes, size=self._size)
        return replace(self._budget, gamma=gamma, shape=shape)

    def observe(self, record: Round, draft: Draft) -> None:
        """Book the round's time and tokens; learn from its nodes."""
        self._context = record.start
        step = self._costs.step(self._context)
        if self._asked:
            spent = self._costs.round(len(draft.tree), self._context) / step
            gained = float(record.committed)
            if draft.scores:
                # half of it by expectation: the luck of single rounds should not close the account
                expected = 1 + self._calibration.expected(draft.scores)[-1]
                self._calibration.observe(draft.scores, record.path)
                gained = (gained + expected) / 2
            self._account = min(self._account + gained - spent, self._limit)
            self._tokens = 0.95 * self._tokens + record.committed
            self._steps = 0.95 * self._steps + spent
        else:
            self._account = min(self._account + self._interest, self._limit)
        self._context = record.start + record.committed

    def _stake(self) -> float:
        """Plain steps lost by drafting once in vain, with the smallest tree."""
        return max(0.0, self._costs.round(1, self._context) / self._costs.step(self._context) - 1)

    def _rate(self) -> float:
        """Tokens a plain step is worth: what drafting has brought lately, never below plain decoding."""
        return max(1.0, (self._tokens + 2) / (self._steps + 2))

    def _size(self, scores: Sequence[float]) -> int:
        """How many of the best nodes to verify; 0 where verifying even one costs more than it brings."""
        step, rate = self._costs.step(self._context), self._rate()
        best, most = 0, -rate * self._costs.scoring(0, self._context) / step
        for nodes, accepted in enumerate(self._calibration.expected(scores), start=1):
            value = accepted - rate * self._costs.scoring(nodes, self._context) / step
            if value > most:
                best, most = nodes, value
        return best
