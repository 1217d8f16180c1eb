"""What produces rows: the seam between the bookkeeping of a corpus and the models that answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from specdiff.corpus.plan import Group, Sampling
from specdiff.corpus.row import CorpusRow


class Backend(Protocol):
    """Answers groups of prompts."""

    def answer(self, group: Group) -> Iterator[list[CorpusRow]]:
        """Yield the rows of a group as they finish; those that finish together come together.

        Which tokens come out should depend on the group alone, as far as the engine behind it allows.
        """
        ...


class BackendSpec(Protocol):
    """How to open a backend; travels to worker processes, so it holds plain data only."""

    def open(self, sampling: Sampling) -> Backend:
        """Load what is needed."""
        ...

    def describe(self) -> dict[str, Any]:
        """What of the backend decides which rows come out, for the manifest."""
        ...
