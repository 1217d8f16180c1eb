"""What the papers report, as far as it is known; what is not known is absent or null, and printed ``n/a``."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("specdiff.repro").joinpath("published.json").read_text(encoding="utf-8"))


def source(paper: str) -> str:
    """Paper, models and machine that its figures belong to."""
    return _data()[paper]["source"]


def value(paper: str, part: str, entry: str, name: str) -> float | None:
    """One published number.

    Args:
        paper: ``"diffuspec"`` or ``"specdiff2"``. part: the table or figure. entry: its row. name: of the number.

    Returns:
        The number; None where it is not known.
    """
    return _data()[paper].get(part, {}).get(entry, {}).get(name)


def entries(paper: str, part: str) -> dict[str, dict[str, float | None]]:
    """All that is known of a table or figure, row by row."""
    return _data()[paper].get(part, {})
