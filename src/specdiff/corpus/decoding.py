"""The backend ``transformers``: a group is one batch in this process, on the very target pass that decoding uses.

Rows stand side by side at their own lengths (`specdiff.models.slot_cache`), no padding slot is ever attended to. A row
that has finished leaves the batch, which shrinks, so that later passes compute only what is still wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdiff.corpus.draw import draw
from specdiff.corpus.plan import Group, Job, Sampling
from specdiff.corpus.row import CorpusRow, Finish
from specdiff.models.target import CausalTarget, ScoreRequest
from specdiff.randomness import RandomStream
from specdiff.types import TokenTree

_NO_TREE = TokenTree(torch.empty(0, dtype=torch.int64), ())


class _Row:
    """An answer under way."""

    def __init__(self, place: int, job: Job, sampling: Sampling) -> None:
        self.place, self.job = place, job
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.uniforms: Tensor = (
            torch.zeros(sampling.max_new_tokens, dtype=torch.float64)
            if sampling.temperature == 0
            else RandomStream(job.seed, "corpus").many(sampling.max_new_tokens)
        )

    @property
    def last(self) -> int:
        return self.ids[-1] if self.ids else self.job.prompt_ids[-1]

    def finished(self, finish: Finish) -> CorpusRow:
        return CorpusRow(
            id=self.job.id,
            sample=self.job.sample,
            prompt_ids=self.job.prompt_ids,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish=finish,
            seed=self.job.seed,
        )


class DecodingBackend:
    """Answers with a target in this process.

    Args:
        target: loaded. sampling: how.
    """

    def __init__(self, target: CausalTarget, sampling: Sampling) -> None:
        self._target, self._sampling = target, sampling

    def answer(self, group: Group) -> Iterator[list[CorpusRow]]:
        """See `specdiff.corpus.backend.Backend`."""
        session = self._target.open(len(group))
        session.prefill([torch.tensor(job.prompt_ids) for job in group])
        rows = [_Row(place, job, self._sampling) for place, job in enumerate(group)]
        for step in range(self._sampling.max_new_tokens):
            requests: list[ScoreRequest | None] = [None] * len(group)
            paths: list[tuple[int, ...] | None] = [None] * len(group)
            for row in rows:
                requests[row.place], paths[row.place] = ScoreRequest(row.last, _NO_TREE), ()
            scored = session.score(requests)
            logits = torch.cat([logits for row in rows if (logits := scored[row.place]) is not None])
            session.commit(paths)
            tokens, logprobs = draw(logits, torch.stack([row.uniforms[step] for row in rows]), self._sampling)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
            ended = [row for row in rows if row.last in self._target.eos_ids]
            full = [row for row in rows if row not in ended] if step + 1 == self._sampling.max_new_tokens else []
            finished = [row.finished("eos") for row in ended] + [row.finished("length") for row in full]
            for row in (*ended, *full):
                session.finish(row.place)
                rows.remove(row)
            if finished:
                yield finished
            if not rows:
                return
