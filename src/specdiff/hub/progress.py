"""What long store operations tell their caller while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["wait", "fetch", "assemble", "convert", "hash"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One report.

    Attributes:
        stage: ``wait`` (another process holds the model's lock), ``fetch``, ``assemble``, ``convert`` or ``hash``.
        item: what is being worked on: a file, or the model.
        done: bytes done so far (0 or 1 for ``wait`` and ``convert``, which cannot be measured).
        total: bytes to do.
    """

    stage: Stage
    item: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """The callback of a caller who does not want to know."""
