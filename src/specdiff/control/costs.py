"""What a round costs for one pair on one machine: seconds against nodes and context; the planner reads it.

A decode pass is not free of its rows: sixteen cost as much as one on one machine and twice as much on another, and a
step comes where a kernel's tile is full. So the table keeps what was measured and interpolates between its entries.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import cast

from specdiff.errors import InputError

_AGAIN = "measure again: specdiff tune --again"


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of the parts of a round.

    Attributes:
        contexts: [C] committed tokens at which was measured, rising. nodes: [M] tree sizes, rising, the first 0.
        target: [C][M] all of a round but the draft, with a tree of so many nodes: the target's pass, laws,
            verification, compaction of the cache, records.
        draft: [C] making a draft (for one-step drafters whatever its gamma: the window is fed whole).
        plain: [C] a step of plain decoding without a drafter, everything included.
    """

    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    target: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    plain: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse a table that cannot be read.

        Raises:
            InputError: axes that do not rise, rows of wrong length, or times that are no positive numbers.
        """
        for name, axis, first in (("contexts", self.contexts, 1), ("nodes", self.nodes, 0)):
            if not axis or any(b <= a for a, b in itertools.pairwise(axis)) or axis[0] < first:
                raise InputError.of(name, expected=f"rising integers from {first} on", got=axis, remedy=_AGAIN)
        if self.nodes[0] != 0:
            raise InputError.of("nodes", expected="a first entry of 0 (no draft)", got=self.nodes, remedy=_AGAIN)
        check_times("draft", self.draft, len(self.contexts))
        check_times("plain", self.plain, len(self.contexts), positive=True)
        if len(self.target) != len(self.contexts):
            raise InputError.of("target", expected=f"{len(self.contexts)} rows", got=len(self.target), remedy=_AGAIN)
        for row in self.target:
            check_times("target", row, len(self.nodes), positive=True)

    def round(self, nodes: float, context: int, *, drafted: bool = True) -> float:
        """Seconds of a round with a tree of ``nodes`` nodes after ``context`` committed tokens."""
        draft = self.at(self.draft, context) if drafted else 0.0
        return draft + self.scoring(nodes, context)

    def scoring(self, nodes: float, context: int) -> float:
        """The same without the draft: what is still to pay once the marginals are known."""
        return self.at([_between(self.nodes, row, nodes) for row in self.target], context)

    def step(self, context: int) -> float:
        """Seconds of a plain step."""
        return self.at(self.plain, context)

    def at(self, seconds: Sequence[float], context: int) -> float:
        """Read off a row [C] of seconds by context."""
        return _between(self.contexts, seconds, context)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> CostTable:
        """From its JSON form.

        Raises:
            InputError: a field is missing or of a wrong kind.
        """
        try:
            contexts, nodes = (tuple(int(v) for v in cast("Sequence[int]", data[n])) for n in ("contexts", "nodes"))
            target = tuple(tuple(float(v) for v in row) for row in cast("Sequence[Sequence[float]]", data["target"]))
            draft, plain = (tuple(float(v) for v in cast("Sequence[float]", data[n])) for n in ("draft", "plain"))
            return cls(contexts=contexts, nodes=nodes, target=target, draft=draft, plain=plain)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"cost table: expected contexts, nodes, target, draft and plain, got {error!r}; {_AGAIN}"
            ) from error


def check_times(name: str, row: Sequence[float], length: int, *, positive: bool = False) -> None:
    """Refuse what is no row of so many times in seconds.

    Raises:
        InputError: naming the row.
    """
    if len(row) != length or any(not math.isfinite(v) or v < 0 or (positive and v == 0) for v in row):
        raise InputError.of(name, expected=f"{length} times in seconds", got=tuple(row), remedy=_AGAIN)


def never_falling(values: Sequence[float]) -> list[float]:
    """The never-falling sequence nearest in squares (isotonic regression by pooling adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            above, many = pools.pop()
            mean, count = (above * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _between(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between entries; the last two extended beyond the end, the first one before the start."""
    if len(axis) == 1 or at <= axis[0]:
        return values[0]
    right = min(bisect.bisect_left(axis, at), len(axis) - 1)
    low, high = axis[right - 1], axis[right]
    share = (at - low) / (high - low)
    return max(values[right - 1] + share * (values[right] - values[right - 1]), min(values[right - 1], values[right]))
