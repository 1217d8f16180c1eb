"""Intervals of resampled figures."""

from __future__ import annotations

from collections.abc import Sequence


def percentiles(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """The central interval that holds ``level`` of the values (one at least)."""
    ordered, tail = sorted(values), (1 - level) / 2
    return ordered[int(tail * len(ordered))], ordered[min(int((1 - tail) * len(ordered)), len(ordered) - 1)]
