"""What is in a corpus: lengths, how few tokens cover the answers, what is doubled, cut off, broken or missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff.corpus.problems import BrokenRowError, CorpusError, CorpusWriteError
from specdiff.corpus.read import find_sources, scan
from specdiff.files import write_text

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COVERAGES = (0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """Counts over all sound rows.

    Attributes:
        rows, prompts, tokens: rows, different prompts, tokens of all answers.
        expected: rows that the manifests ask for; None where there is no manifest.
        prompt_lengths, answer_lengths: tokens at each of `QUANTILES`.
        coverage: how many different tokens, the most frequent first, make up each of `COVERAGES` of all answer tokens.
        finish: rows by finish reason; ``length`` are those cut off.
        duplicate_answers: rows whose prompt and answer another row has too.
        mean_logprob: of all answer tokens.
        counts: how often each token occurs in answers, most frequent first (the smaller id first among equals).
        broken: what is wrong with the other lines.
    """

    rows: int
    prompts: int
    tokens: int
    expected: int | None
    prompt_lengths: tuple[int, ...]
    answer_lengths: tuple[int, ...]
    coverage: tuple[int, ...]
    finish: dict[str, int]
    duplicate_answers: int
    mean_logprob: float
    counts: tuple[tuple[int, int], ...]
    broken: tuple[BrokenRowError, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the counts of single tokens."""
        return {
            "rows": self.rows,
            "prompts": self.prompts,
            "answer_tokens": self.tokens,
            "expected_rows": self.expected,
            "prompt_lengths": dict(zip(map(str, QUANTILES), self.prompt_lengths, strict=False)),
            "answer_lengths": dict(zip(map(str, QUANTILES), self.answer_lengths, strict=False)),
            "distinct_tokens_for_coverage": dict(zip(map(str, COVERAGES), self.coverage, strict=False)),
            "finish": self.finish,
            "duplicate_answers": self.duplicate_answers,
            "mean_logprob": self.mean_logprob,
            "broken": [
                {"file": str(e.path), "line": e.line, "kind": e.kind.value, "message": e.reason} for e in self.broken
            ],
        }


def corpus_stats(paths: str | Path | Iterable[str | Path], *, vocab_size: int | None = None) -> CorpusStats:
    """Go through corpora; broken lines are collected, not raised.

    Args:
        paths: folders of corpora, or row files. vocab_size: ids must be below it, where no manifest says so.

    Raises:
        CorpusError: a path is no corpus.
    """
    sources = find_sources(paths)
    broken: list[BrokenRowError] = []
    prompts: set[str] = set()
    prompt_lengths: list[int] = []
    answer_lengths: list[int] = []
    answers: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    finish: Counter[str] = Counter()
    total = 0.0
    for row in scan(sources, vocab_size=vocab_size):
        if isinstance(row, BrokenRowError):
            broken.append(row)
            continue
        prompts.add(row.id)
        prompt_lengths.append(len(row.prompt_ids))
        answer_lengths.append(len(row.ids))
        answers[hash((row.prompt_ids, row.ids))] += 1
        tokens.update(row.ids)
        finish[row.finish] += 1
        total += sum(row.logprobs)
    counts = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))
    expected = {id(s.manifest): s.manifest.num_rows for s in sources if s.manifest is not None}
    return CorpusStats(
        rows=len(answer_lengths),
        prompts=len(prompts),
        tokens=sum(answer_lengths),
        expected=sum(expected.values()) if expected else None,
        prompt_lengths=_quantiles(prompt_lengths),
        answer_lengths=_quantiles(answer_lengths),
        coverage=tuple(len(covering(counts, share)) for share in COVERAGES) if counts else (),
        finish=dict(sorted(finish.items())),
        duplicate_answers=sum(n - 1 for n in answers.values()),
        mean_logprob=total / max(1, sum(answer_lengths)),
        counts=tuple(counts),
        broken=tuple(broken),
    )


def covering(counts: Sequence[tuple[int, int]], share: float) -> list[int]:
    """The fewest tokens that make up ``share`` of all occurrences.

    Args:
        counts: (token, occurrences), most frequent first. share: in (0, 1].
    """
    total = sum(count for _, count in counts)
    chosen: list[int] = []
    covered = 0
    for token, count in counts:
        if covered >= share * total:
            break
        chosen.append(token)
        covered += count
    return chosen


def write_vocabulary(path: Path, stats: CorpusStats, *, coverage: float | None = None, size: int | None = None) -> int:
    """Write the most frequent answer tokens as a JSON list of ids, sorted: a draft vocabulary.

    Args:
        path: the file. stats: of the corpus.
        coverage: share of the answer tokens to cover, in (0, 1]. size: how many tokens instead.

    Returns:
        How many tokens it holds.

    Raises:
        CorpusError: neither or both of ``coverage`` and ``size`` are given, or out of range. CorpusWriteError.
    """
    if (coverage is None) == (size is None):
        raise CorpusError("vocabulary: expected either a coverage or a size, got both or neither; give one")
    if (coverage is not None and not 0 < coverage <= 1) or (size is not None and size < 1):
        raise CorpusError(f"vocabulary: expected a coverage in (0, 1] or a size >= 1, got {coverage or size}")
    if size is not None:
        chosen = [token for token, _ in stats.counts[:size]]
    else:
        assert coverage is not None
        chosen = covering(stats.counts, coverage)
    try:
        write_text(path, json.dumps(sorted(chosen)) + "\n")
    except OSError as error:
        raise CorpusWriteError(f"{path}: cannot be written ({error.strerror or error})") from error
    return len(chosen)


def _quantiles(lengths: list[int]) -> tuple[int, ...]:
    """The length at each of `QUANTILES`: the smallest one that so many rows do not exceed; () of no rows."""
    ordered = sorted(lengths)
    return tuple(ordered[round(q * (len(ordered) - 1))] for q in QUANTILES) if ordered else ()
