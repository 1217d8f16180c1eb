"""What decides the size and shape of the next draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from specdiff.types import Budget, Draft, Round


class Controller(Protocol):
    """One request's controller: asked for a budget before each round, told the record after it."""

    def budget(self, room: int) -> Budget | None:
        """Budget of the next round with gamma <= ``room`` (tokens the request can still use); None = do not draft."""
        ...

    def observe(self, record: Round, draft: Draft) -> None:
        """Hear what the round brought."""
        ...


class FixedBudget:
    """The same budget every round, cut to the room that is left."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, room: int) -> Budget | None:
        """The fixed budget, its gamma cut to ``room``; None when there is no room for a draft."""
        if room < 1:
            return None
        return self._budget if self._budget.gamma <= room else replace(self._budget, gamma=room)

    def observe(self, record: Round, draft: Draft) -> None:
        """A fixed budget learns nothing."""
