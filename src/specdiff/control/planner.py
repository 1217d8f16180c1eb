"""The planner: the draft that pays best in each round, and none where none does (beyond SpecDiff-2 and DiffuSpec).

Time is counted in plain steps: a plain step costs 1 and brings 1 token. A round of setting a costs c_a and brings
1 + n_a tokens, n_a of them accepted drafted ones. Three rules decide.

**Which setting.** The one with the largest rate (1 + n_a) / c_a. What n_a will be is estimated from the text at hand:

    n_a = (sum of accepted over a's own rounds + W t m_a) / (a's own rounds + W),
    t   = (accepted in all rounds + S) / (sum of m over all rounds + S),

with m_a what the setting brought on the sample texts, and t how this text compares to them: one number for all
settings, so that a hard text makes small drafts rise against large ones before each has been tried. The past fades by
the token.

**How many nodes**, for best-first trees, once the marginals are known: as many as make ``accepted - rate * cost``
largest, with accepted the sum of the nodes' calibrated probabilities (`calibration`) and ``rate`` the tokens a plain
step that this text has brought lately, at least 1. It may be none: then the round goes on as a plain step.

**Whether to draft.** Where the best rate is above 1; and where the interest since the last draft pays for a try, so
that a text that has become easy is found out. Both only as far as the account allows it: it opens with ``opening``
plain steps, each plain step adds ``interest``, each drafting round adds its tokens and takes its cost, nothing above
``limit`` is kept, and no draft is made, no node added, that it could not pay if nothing at all were accepted. So the
account is never negative, and at any moment, whatever the text does and whatever the drafter claims,

    time spent <= tokens + opening + interest * plain steps     (by the cost table, in plain steps):

at 128 tokens at most 2.5 + 0.0075 * 128 = 3.5 plain steps, 2.7 %, are lost to drafting.

All decisions follow from what was accepted before, from the marginals before anything is drawn, and from a table
measured beforehand. No clock is read, so the same seed still gives the same tokens; and the law of the text is
untouched (docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdiff.control.calibration import Calibration, claimed
from specdiff.control.menu import Arm, Menu
from specdiff.types import BestFirst, Budget, Draft, Round

OPENING, INTEREST, LIMIT = 2.5, 0.0075, 8.0
_FADE = 0.98  # of what was seen, a committed token: half of it in 34
_OWN = 6.0  # rounds of its own that a setting's estimate from all rounds counts for (W)
_STEADY = 4.0  # accepted tokens that the sample texts count for (S)


@dataclass
class _Seen:
    """Fading sums over a setting's own rounds."""

    rounds: float = 0.0
    accepted: float = 0.0
    cost: float = 0.0

    def fade(self, keep: float) -> None:
        self.rounds, self.accepted, self.cost = keep * self.rounds, keep * self.accepted, keep * self.cost


class Planner:
    """One request's planner.

    Args:
        menu: what it chooses from.
        opening, interest, limit: of the account, in plain steps; the opening counts only where the menu promises more
            than plain decoding.
    """

    def __init__(self, menu: Menu, opening: float = OPENING, interest: float = INTEREST, limit: float = LIMIT) -> None:
        self._menu, self._interest, self._limit = menu, interest, limit
        self._account = min(opening, limit) if menu.planned.speedup > 1 else 0.0
        self._saved = 0.0  # interest since the last draft
        self._context: int | None = None  # until the first record tells
        self._choice: int | None = None  # the setting of the round asked for
        self._seen = [_Seen() for _ in menu.arms]
        self._accepted = self._promised = 0.0  # of all drafting rounds, fading
        self._tokens = self._steps = 0.0
        self._calibration = Calibration(menu.prior or claimed())

    @property
    def account(self) -> float:
        """Credit in plain steps, never negative."""
        return self._account

    @property
    def choice(self) -> Arm | None:
        """The setting of the round asked for last; None = a plain step."""
        return None if self._choice is None else self._menu.arms[self._choice]

    def budget(self, room: int) -> Budget | None:
        """The budget of the next round; None where a draft does not pay."""
        self._choice = self._best(room) if room >= 1 else None
        if self._choice is None:
            return None
        budget = self._menu.arms[self._choice].budget
        shape = budget.shape
        if isinstance(shape, BestFirst):
            shape = BestFirst(shape.nodes, size=self._size)
        return replace(budget, gamma=min(budget.gamma, room), shape=shape)

    def observe(self, record: Round, draft: Draft) -> None:
        """Book the round's time and tokens; learn from its nodes."""
        self._context = record.start
        keep = _FADE**record.committed
        for seen in self._seen:
            seen.fade(keep)
        self._accepted, self._promised = keep * self._accepted, keep * self._promised
        self._calibration.observe(draft.scores, record.path)  # a plain step makes it forget
        if self._choice is None:
            self._account = min(self._account + self._interest, self._limit)
            self._saved += self._interest
        else:
            self._book(record, draft)
        self._context = record.start + record.committed

    def _book(self, record: Round, draft: Draft) -> None:
        assert self._choice is not None
        arm, seen = self._menu.arms[self._choice], self._seen[self._choice]
        cost = self._cost(arm, len(draft.tree))
        self._account = min(self._account + record.committed - cost, self._limit)
        self._saved = 0.0
        seen.rounds, seen.accepted, seen.cost = seen.rounds + 1, seen.accepted + record.accepted, seen.cost + cost
        self._accepted, self._promised = self._accepted + record.accepted, self._promised + arm.accepted
        self._tokens, self._steps = 0.95 * self._tokens + record.committed, 0.95 * self._steps + cost

    def _best(self, room: int) -> int | None:
        """Which setting to use; None = a plain step."""
        rates: dict[int, float] = {}
        for i, arm in enumerate(self._menu.arms):
            stake = self._cost(arm, 1 if arm.sized else arm.nodes) - 1
            if stake <= self._account:
                rates[i] = self._rate_of(i, arm, room)
        if not rates:
            return None
        best = max(rates, key=rates.__getitem__)
        arm = self._menu.arms[best]
        tries = self._saved >= self._cost(arm, 1 if arm.sized else arm.nodes) - 1
        return best if rates[best] > 1 or tries else None

    def _rate_of(self, index: int, arm: Arm, room: int) -> float:
        """Tokens a plain step that a setting is expected to bring."""
        seen = self._seen[index]
        trust = (self._accepted + _STEADY) / (self._promised + _STEADY)
        rounds = seen.rounds + _OWN
        accepted = (seen.accepted + _OWN * trust * arm.accepted) / rounds
        cost = (seen.cost + _OWN * self._cost(arm, arm.nodes)) / rounds
        return (1 + min(accepted, room)) / cost

    def _cost(self, arm: Arm, nodes: float) -> float:
        """Plain steps of a round; before the first record the most at any context of the table."""
        known = self._menu.costs.contexts if self._context is None else (self._context,)
        return max(self._menu.cost(arm, nodes, context) for context in known)

    def _rate(self) -> float:
        """Tokens a plain step is worth: what drafting has brought lately, at first what was promised."""
        return max(1.0, (self._tokens + 4 * self._menu.planned.speedup) / (self._steps + 4))

    def _size(self, scores: Sequence[float]) -> int:
        """How many of the best nodes to verify, as far as the account pays; 0 where even one is not worth it."""
        assert self._choice is not None
        arm, rate = self._menu.arms[self._choice], self._rate()
        best, most = 0, -rate * self._cost(arm, 0)
        for nodes, accepted in enumerate(self._calibration.expected(scores), start=1):
            cost = self._cost(arm, nodes)
            if cost - 1 > self._account:
                break
            value = accepted - rate * cost
            if value > most:
                best, most = nodes, value
        return best
