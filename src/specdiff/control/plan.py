"""A plan: all that the planner knows of a pair before the first token; made by ``specdiff tune``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specdiff.checking import real
from specdiff.control.menu import Menu
from specdiff.control.planner import INTEREST, LIMIT, OPENING, Planner
from specdiff.types import Budget


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a pair on a machine.

    Attributes:
        greedy, sampled: what may be drafted at temperature 0 and above.
        temperature: at which the sampled part was measured; the planner learns from the text how others differ.
        opening, interest, limit: of the planner's account, see `specdiff.control.planner`.

    Raises:
        InputError: credit below 0, or a temperature of 0.
    """

    greedy: Menu
    sampled: Menu
    temperature: float = 1.0
    opening: float = OPENING
    interest: float = INTEREST
    limit: float = LIMIT

    def __post_init__(self) -> None:
        for name in ("opening", "interest", "limit"):
            value = getattr(self, name)
            real(name, value, lambda v: 0 <= v < math.inf, expected="a number >= 0", remedy="leave it out")
        value = self.temperature
        real("temperature", value, lambda v: 0 < v < math.inf, expected="a number > 0", remedy="leave it out for 1")

    def menu(self, *, greedy: bool) -> Menu:
        """What may be drafted at temperature 0, or above."""
        return self.greedy if greedy else self.sampled

    def controller(self, *, greedy: bool) -> Callable[[Budget], Planner]:
        """What makes a request's planner, for `specdiff.decoder.Settings`, beside the first arm's budget."""

        def planner(budget: Budget) -> Planner:
            return Planner(self.menu(greedy=greedy), self.opening, self.interest, self.limit)

        return planner
