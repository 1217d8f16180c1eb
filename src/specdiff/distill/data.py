"""From corpora to training rows, and the prompts that are kept out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from specdiff.corpus.read import Corpus
from specdiff.corpus.row import CorpusRow
from specdiff.errors import InputError
from specdiff.train.windows import AnswerRow


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows by what they are for.

    Attributes:
        sources: of each corpus, the rows to train on and its weight in a batch.
        held_out: prompts never trained on, as (name, token ids); the same for every run over these prompts.
        replay: their temperature-0 answers.
    """

    sources: tuple[tuple[tuple[AnswerRow, ...], float], ...]
    held_out: tuple[tuple[str, tuple[int, ...]], ...]
    replay: tuple[AnswerRow, ...]


def split(corpora: Sequence[tuple[Corpus, float]], *, held_out: int, window: int) -> Split:
    """Hold out whole prompts, with all their answers in all corpora.

    Which prompts is decided by a hash of their names, so that runs of another seed, or over other answers to them, keep
    the same out.

    Args:
        corpora: with their weights. held_out: prompts. window: W of the drafter.

    Raises:
        InputError: too few prompts to hold out any and train on the rest, or no answer as long as a window.
    """
    prompts: dict[str, tuple[int, ...]] = {}
    for corpus, _ in corpora:
        for row in corpus.rows:
            prompts.setdefault(row.id, row.prompt_ids)
    if held_out >= len(prompts):
        raise InputError.of(
            "held_out",
            expected=f"fewer than the {len(prompts)} prompts there are",
            got=held_out,
            remedy="hold out fewer, or make a larger corpus",
        )
    chosen = sorted(prompts, key=lambda name: hashlib.sha256(name.encode()).digest())[:held_out]
    out = set(chosen)
    sources = tuple(
        (tuple(_answer(row) for row in corpus.rows if row.id not in out), weight) for corpus, weight in corpora
    )
    longest = max((len(r.tokens) - r.prompt_length for rows, _ in sources for r in rows), default=0)
    if longest < window:
        raise InputError.of(
            "window",
            expected=f"at most {longest}, the longest answer to train on",
            got=window,
            remedy="draft fewer tokens, or make a corpus of longer answers",
        )
    replay = tuple(
        _answer(row)
        for corpus, _ in corpora
        if all(m.sampling.temperature == 0 for m in corpus.manifests) and corpus.manifests
        for row in corpus.rows
        if row.id in out and row.sample == 0
    )
    return Split(sources=sources, held_out=tuple((name, prompts[name]) for name in chosen), replay=replay)


def _answer(row: CorpusRow) -> AnswerRow:
    return AnswerRow(id=row.id, tokens=(*row.prompt_ids, *row.ids), prompt_length=len(row.prompt_ids))
