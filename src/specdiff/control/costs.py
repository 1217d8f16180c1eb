"""What a round costs for one pair on one machine: seconds against nodes and context; the planner reads it.

A decode pass is not free of its rows: sixteen cost as much as one on one machine and twice as much on another, and a
step comes where a kernel's tile is full. So the table keeps what was measured and interpolates between its entries.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from specdiff.errors import InputError


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of the parts of a round.

    Attributes:
        contexts: [C] committed tokens at which was measured, rising. nodes: [M] tree sizes, rising, the first 0.
        target: [C][M] a target pass over the last token and so many nodes.
        draft: [C] making a draft (for one-step drafters whatever its gamma: the window is fed whole).
        rest: [C] everything else of a round: laws, verification, records.
        plain: [C] a step of plain decoding, everything included.
    """

    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    target: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    rest: tuple[float, ...]
    plain: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse a table that cannot be read.

        Raises:
            InputError: axes that do not rise, rows of wrong length, or times that are no positive numbers.
        """
        for name, axis, first in (("contexts", self.contexts, 1), ("nodes", self.nodes, 0)):
            if not axis or any(b <= a for a, b in itertools.pairwise(axis)) or axis[0] < first:
                raise InputError.of(
                    name, expected=f"rising integers from {first} on", got=axis, remedy="measure again: specdiff tune"
                )
        if self.nodes[0] != 0:
            raise InputError.of(
                "nodes", expected="a first entry of 0 (no draft)", got=self.nodes, remedy="measure again: specdiff tune"
            )
        rows = {"draft": self.draft, "rest": self.rest, "plain": self.plain}
        for name, row in rows.items():
            _check_times(name, row, len(self.contexts), positive=name == "plain")
        if len(self.target) != len(self.contexts):
            raise InputError.of(
                "target",
                expected=f"{len(self.contexts)} rows",
                got=len(self.target),
                remedy="measure again: specdiff tune",
            )
        for row in self.target:
            _check_times("target", row, len(self.nodes), positive=True)

    def round(self, nodes: int, context: int, *, drafted: bool = True) -> float:
        """Seconds of a round with a tree of ``nodes`` nodes after ``context`` committed tokens."""
        draft = _between(self.contexts, self.draft, context) if drafted else 0.0
        return draft + self.scoring(nodes, context)

    def scoring(self, nodes: int, context: int) -> float:
        """The same without the draft: what is still to pay once the marginals are known."""
        row = [_between(self.nodes, at, nodes) for at in self.target]
        return _between(self.contexts, row, context) + _between(self.contexts, self.rest, context)

    def step(self, context: int) -> float:
        """Seconds of a plain step."""
        return _between(self.contexts, self.plain, context)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {name: getattr(self, name) for name in ("contexts", "nodes", "target", "draft", "rest", "plain")}

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> CostTable:
        """From its JSON form.

        Raises:
            InputError: a field is missing or of a wrong kind.
        """
        try:
            lists = {name: cast("Sequence[float]", data[name]) for name in ("draft", "rest", "plain")}
            contexts, nodes = (
                tuple(int(v) for v in cast("Sequence[int]", data[name])) for name in ("contexts", "nodes")
            )
            target = tuple(tuple(float(v) for v in row) for row in cast("Sequence[Sequence[float]]", data["target"]))
            draft, rest, plain = (tuple(float(v) for v in row) for row in lists.values())
            return cls(contexts=contexts, nodes=nodes, target=target, draft=draft, rest=rest, plain=plain)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"cost table: expected contexts, nodes, target, draft, rest and plain, got {error!r}; "
                "measure again: specdiff tune"
            ) from error


def _between(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between entries; the last two extended beyond the end, the first one before the start."""
    if len(axis) == 1 or at <= axis[0]:
        return values[0]
    right = min(bisect.bisect_left(axis, at), len(axis) - 1)
    low, high = axis[right - 1], axis[right]
    share = (at - low) / (high - low)
    return max(values[right - 1] + share * (values[right] - values[right - 1]), min(values[right - 1], values[right]))


def _check_times(name: str, row: Sequence[float], length: int, *, positive: bool) -> None:
    if len(row) != length or any(not math.isfinite(v) or v < 0 or (positive and v == 0) for v in row):
        raise InputError.of(
            name, expected=f"{length} times in seconds", got=tuple(row), remedy="measure again: specdiff tune"
        )
