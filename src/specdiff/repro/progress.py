"""How studies tell what they are doing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a job is."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` rows, or steps, of ``what``."""
        ...


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""
