"""ADL, the adaptive draft length of DiffuSpec (arXiv 2510.02358): how deep to draft, from the last rounds.

After each round, with L_gen the tokens before the first EOS of the raw draft and L_acc the tokens accepted,

    m_gen <- (1 - rho) m_gen + rho L_gen,   m_acc <- (1 - rho) m_acc + rho L_acc,
    k <- clip(floor(m_gen) + delta [m_acc >= m_gen], k_min, k_max),

and k starts at k_max. The paper does not say where the averages start. Here they start at the first observation; a
reproduction starts them at 0 (``from_zero``), which makes the first drafts shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdiff.checking import flag, integer, real
from specdiff.errors import InputError
from specdiff.types import Budget, Draft, Round


@dataclass(frozen=True, kw_only=True)
class LengthRule:
    """The numbers of ADL; the defaults are the paper's.

    Attributes:
        k_min, k_max: shortest and longest draft, in tokens. delta: added where all that was generated is accepted.
        rho: weight of the newest round in the averages. from_zero: the averages start at 0.

    Raises:
        InputError: k_min is below 1 or above k_max, delta is below 0, or rho is not in (0, 1].
    """

    k_min: int = 20
    k_max: int = 30
    delta: int = 10
    rho: float = 0.5
    from_zero: bool = False

    def __post_init__(self) -> None:
        integer("k_min", self.k_min, 1, remedy="the paper has 20")
        integer("k_max", self.k_max, 1, remedy="the paper has 30")
        if self.k_min > self.k_max:
            raise InputError.of(
                "k_min", expected=f"at most k_max, {self.k_max}", got=self.k_min, remedy="the paper has 20 and 30"
            )
        integer("delta", self.delta, 0, remedy="the paper has 10")
        real("rho", self.rho, lambda v: 0 < v <= 1, expected="a number in (0, 1]", remedy="the paper has 0.5")
        flag("from_zero", self.from_zero, remedy="say whether the averages start at 0")

    @classmethod
    def scaled(cls, window: int) -> LengthRule:
        """The paper's numbers in a drafter's window.

        They are kept where the window holds 30 tokens; in a shorter one all are scaled down: k_max is the window, k_min
        two thirds and delta a third of it, rounded up.

        Args:
            window: largest gamma, >= 1.

        Raises:
            InputError: the window is below 1.
        """
        integer("window", window, 1, remedy="give the drafter's window")
        longest = min(window, cls.k_max)
        return cls(k_min=math.ceil(2 * longest / 3), k_max=longest, delta=math.ceil(longest / 3))

    def controller(self, budget: Budget) -> AdaptiveLength:
        """A request's controller; give this method to `specdiff.decoder.Settings`."""
        return AdaptiveLength(budget, self)


class AdaptiveLength:
    """One request's draft length.

    Rounds without a draft teach nothing. Where the drafter does not know the raw draft's length (`Draft.generated`), it
    counts as the depth asked for.

    Args:
        budget: shape and draft temperature of every round; its gamma is replaced. rule: the numbers; default: scaled to
            the budget's gamma.
    """

    def __init__(self, budget: Budget, rule: LengthRule | None = None) -> None:
        self._budget = budget
        self._rule = LengthRule.scaled(budget.gamma) if rule is None else rule
        self._length = self._rule.k_max
        self._asked = 0
        self._generated = self._accepted = 0.0
        self._started = self._rule.from_zero

    @property
    def length(self) -> int:
        """Depth k of the next round, before the room cuts it."""
        return self._length

    def budget(self, room: int) -> Budget | None:
        """The budget with gamma = k, cut to ``room``; None when there is no room for a draft."""
        self._asked = max(0, min(self._length, room))
        return replace(self._budget, gamma=self._asked, raw_length=True) if self._asked else None

    def observe(self, record: Round, draft: Draft) -> None:
        """Average what was generated and accepted; choose the next length."""
        if not self._asked or not len(draft.tree):
            return
        generated = self._asked if draft.generated is None else draft.generated
        rho = self._rule.rho if self._started else 1.0
        self._started = True
        self._generated += rho * (generated - self._generated)
        self._accepted += rho * (record.accepted - self._accepted)
        longer = self._rule.delta if self._accepted >= self._generated else 0
        wished = math.floor(self._generated) + longer
        self._length = min(max(wished, self._rule.k_min), self._rule.k_max)
