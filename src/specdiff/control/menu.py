"""What the planner chooses from at one temperature: settings of a round, what each brings and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdiff.checking import real
from specdiff.control.calibration import claimed
from specdiff.control.costs import CostTable, check_times
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget

_AGAIN = "measure again: specdiff tune --again"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A setting of a round.

    Attributes:
        budget: gamma, shape and draft temperature; with the shape comes the draft's provenance and with it the rule
            that ``rule="auto"`` takes. The nodes of a best-first shape are the most that the planner may use; other
            shapes are used whole or not at all.
        accepted, nodes: drafted tokens accepted, and nodes verified, a round: means over the sample texts.
        seconds: [C] of a whole round at the table's contexts; none for best-first shapes, whose costs are the table's.
    """

    budget: Budget
    accepted: float
    nodes: float
    seconds: tuple[float, ...] = ()

    @property
    def sized(self) -> bool:
        """Whether the planner cuts the tree to a size of its own."""
        return isinstance(self.budget.shape, BestFirst)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            InputError: a budget out of range, or a mean below 0.
        """
        self.budget.validate()
        for name in ("accepted", "nodes"):
            real(name, getattr(self, name), lambda v: 0 <= v < math.inf, expected="a number >= 0", remedy=_AGAIN)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What to expect on texts like those it was tuned on.

    Attributes:
        tau: tokens a target pass. speedup: over plain decoding, by the cost table. nodes: mean a round.
    """

    tau: float
    speedup: float
    nodes: float


@dataclass(frozen=True, kw_only=True)
class Menu:
    """All that may be drafted at a temperature.

    Attributes:
        costs: seconds of the parts of a round at this temperature. arms: the settings, at least one.
        planned: what the planner makes of them. fixed: what each of them makes used always and whole, best first, as
            text and prediction.
        prior: [bins] acceptance rates by the drafter's claim, for best-first shapes.
    """

    costs: CostTable
    arms: tuple[Arm, ...]
    planned: Prediction
    fixed: tuple[tuple[str, Prediction], ...] = ()
    prior: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be chosen from.

        Raises:
            InputError: no arms, times that do not fit the table, or a prior of another length than the bins.
        """
        if not self.arms:
            raise InputError.of("arms", expected="at least one setting", got=0, remedy=_AGAIN)
        for arm in self.arms:
            check_times("seconds", arm.seconds, 0 if arm.sized else len(self.costs.contexts), positive=True)
        if self.prior and (len(self.prior) != len(claimed()) or not all(0 <= rate <= 1 for rate in self.prior)):
            expected = f"{len(claimed())} rates in [0, 1]"
            raise InputError.of("prior", expected=expected, got=self.prior, remedy=_AGAIN)

    def cost(self, arm: Arm, nodes: float, context: int) -> float:
        """Plain steps that a round of this setting takes, ``nodes`` of them drafted; 0: the draft was made in vain."""
        whole = arm.seconds and nodes > 0
        seconds = self.costs.at(arm.seconds, context) if whole else self.costs.round(nodes, context)
        return seconds / self.costs.step(context)
