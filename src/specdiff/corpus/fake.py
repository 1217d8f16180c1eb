"""A backend without a model, for tests of everything around one: its tokens are a hash of the row's seed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdiff.corpus.plan import Group, Job, Sampling
from specdiff.corpus.row import CorpusRow

VOCAB, EOS = 256, 0


@dataclass(frozen=True, kw_only=True)
class FakeSpec:
    """Opens a `FakeBackend`.

    Attributes:
        delay: seconds a step takes.
    """

    delay: float = 0.0

    def open(self, sampling: Sampling) -> FakeBackend:
        """Make one."""
        return FakeBackend(sampling, self.delay)

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": "fake"}


class FakeBackend:
    """Rows finish one token at a time, as a real backend's do."""

    def __init__(self, sampling: Sampling, delay: float = 0.0) -> None:
        self._sampling, self._delay = sampling, delay

    def answer(self, group: Group) -> Iterator[list[CorpusRow]]:
        """See `specdiff.corpus.backend.Backend`."""
        rows = [_row(job, self._sampling.max_new_tokens) for job in group]
        for step in range(1, self._sampling.max_new_tokens + 1):
            time.sleep(self._delay)
            finished = [row for row in rows if len(row.ids) == step]
            if finished:
                yield finished


def _row(job: Job, longest: int) -> CorpusRow:
    noise = hashlib.sha256(str(job.seed).encode()).digest() * (longest // 32 + 1)
    length = min(1 + noise[0] % 24, longest)
    eos = length < longest
    ids = [1 + byte % (VOCAB - 1) for byte in noise[:length]]
    return CorpusRow(
        id=job.id,
        sample=job.sample,
        prompt_ids=job.prompt_ids,
        ids=tuple([*ids[:-1], EOS] if eos else ids),
        logprobs=tuple(-i / 64 for i in ids),
        finish="eos" if eos else "length",
        seed=job.seed,
    )
