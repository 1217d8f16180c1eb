"""From answers of the target to packed batches with many draft windows.

A row is a prompt and the target's answer, as token ids. Every answer position is a possible anchor: the last committed
token, from the last prompt token on. A batch holds several rows padded to one length, each with the same number of
windows hanging off its context (see `specdiff.train.attention`).

Which rows and anchors make up batch ``i`` is a pure function of the seed and ``i``, so the position in the data is one
integer, and a resumed run sees exactly what an uninterrupted one would have seen.

Shape legend: B batch, T context rows, A windows, W window rows, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.masked import IGNORED


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One prompt and the target's answer.

    Attributes:
        id: name of the prompt.
        tokens: prompt ids followed by answer ids.
        prompt_length: how many of `tokens` are the prompt's (at least 1).
    """

    id: str
    tokens: tuple[int, ...]
    prompt_length: int

    @property
    def anchors(self) -> range:
        """Indices of `tokens` that can be the last committed one, with at least one token after it."""
        return range(self.prompt_length - 1, len(self.tokens) - 1)


@dataclass(frozen=True, kw_only=True)
class WindowBatch:
    """A packed batch.

    Attributes:
        context: [B, T] int64 token ids, padded on the right with 0.
        anchors: [B, A] int64 context index of each window's last committed token.
        last_tokens: [B, A] int64 that token.
        labels: [B, A, W] int64 draft-vocabulary columns of the tokens after the anchor, `IGNORED` where there is
            none or the draft vocabulary lacks it.
        following: [B, A, W] int64 those tokens themselves, 0 where there is none.
        reached: [B, A, W] bool, where there is one.
    """

    context: Tensor
    anchors: Tensor
    last_tokens: Tensor
    labels: Tensor
    following: Tensor
    reached: Tensor

    @property
    def num_windows(self) -> int:
        """Windows with at least one label."""
        return int((self.labels != IGNORED).any(-1).sum())


def read_rows(
    path: str | Path, *, max_length: int = 1024, keep: Callable[[str], bool] = lambda _: True
) -> list[AnswerRow]:
    """Read answers from JSON lines with ``id``, ``prompt_ids`` and ``ids``.

    Args:
        path: the file.
        max_length: tokens kept of a row; rows whose prompt alone is longer are dropped.
        keep: says by its id whether to read a row.

    Returns:
        The rows in file order, without those that have no answer.

    Raises:
        ValueError: a line is not such an object.
    """
    rows: list[AnswerRow] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                name, prompt, answer = str(item["id"]), item["prompt_ids"], item["ids"]
                tokens = tuple(int(t) for t in (*prompt, *answer))[:max_length]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: expected an object with id, prompt_ids and ids, got {error!r}; "
                    "write the answers as one JSON object a line"
                ) from error
            if not prompt:
                raise InputError(f"{path}, line {number}: expected a prompt of at least one token, got none")
            if keep(name) and len(tokens) > len(prompt):
                rows.append(AnswerRow(id=name, tokens=tokens, prompt_length=len(prompt)))
    return rows


def frequent_tokens(rows: Iterable[AnswerRow], *, vocab_size: int, size: int, always: Sequence[int] = ()) -> Tensor:
    """Choose a draft vocabulary: the tokens that answers use most.

    Args:
        rows: training rows.
        vocab_size: the target's vocabulary size (V).
        size: how many tokens to keep at most, besides `always`.
        always: ids to keep in any case, such as the end-of-sequence ids.

    Returns:
        [D] sorted int64 token ids.
    """
    answers = [torch.tensor(r.tokens[r.prompt_length :], dtype=torch.int64) for r in rows]
    counts = torch.bincount(torch.cat(answers), minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    used = order[counts[order] > 0]
    return torch.unique(torch.cat([used, torch.tensor(list(always), dtype=torch.int64)]))


def label_table(draft_vocab: Tensor, vocab_size: int) -> Tensor:
    """Return [V] int64: each target token's column of the draft vocabulary, `IGNORED` for those it lacks."""
    table = torch.full((vocab_size,), IGNORED, dtype=torch.int64)
    table[draft_vocab] = torch.arange(draft_vocab.numel())
    return table


def draw_anchors(row: AnswerRow, count: int, generator: torch.Generator) -> list[int]:
    """Draw distinct anchors of a row, sorted; fewer than `count` if the row has fewer."""
    places = row.anchors
    order = torch.randperm(len(places), generator=generator)[:count].sort().values
    return [places[i] for i in order.tolist()]


def pack(rows: Sequence[AnswerRow], anchors: Sequence[Sequence[int]], *, window: int, labels_of: Tensor) -> WindowBatch:
    """Pad rows and their windows to one batch.

    Context behind a row's last anchor is cut off, since no window can see it. Rows with fewer windows than the others
    are filled up with windows that have no labels.

    Args:
        rows: the B rows.
        anchors: for each row, its anchors.
        window: rows of a window (W).
        labels_of: [V] from `label_table`.

    Returns:
        The batch.

    Raises:
        ValueError: a row has no anchor, or one that lies outside its answer.
    """
    for row, chosen in zip(rows, anchors, strict=True):
        if not chosen or any(a not in row.anchors for a in chosen):
            raise InputError(f"anchors of {row.id}: expected some indices in {row.anchors}, got {list(chosen)}")
    # The anchor itself is fed by its window, so the context ends one token before the last anchor.
    num_context = max(1, *(max(chosen) for chosen in anchors))
    num_windows = max(len(chosen) for chosen in anchors)
    context = torch.zeros(len(rows), num_context, dtype=torch.int64)
    padded_anchors = torch.zeros(len(rows), num_windows, dtype=torch.int64)
    last_tokens = torch.zeros_like(padded_anchors)
    labels = torch.full((len(rows), num_windows, window), IGNORED, dtype=torch.int64)
    following, reached = torch.zeros_like(labels), torch.zeros_like(labels, dtype=torch.bool)
    for b, (row, chosen) in enumerate(zip(rows, anchors, strict=True)):
        tokens = torch.tensor(row.tokens, dtype=torch.int64)
        length = max(chosen)
        context[b, :length] = tokens[:length]
        places = torch.tensor(chosen)
        padded_anchors[b, : len(chosen)] = places
        last_tokens[b, : len(chosen)] = tokens[places]
        columns = torch.cat([labels_of[tokens], torch.full((window,), IGNORED)])
        labels[b, : len(chosen)] = columns.unfold(0, window, 1)[places + 1]
        padded = torch.cat([tokens, tokens.new_zeros(window)])
        following[b, : len(chosen)] = padded.unfold(0, window, 1)[places + 1]
        reached[b, : len(chosen)] = places[:, None] + 1 + torch.arange(window) < len(tokens)
    return WindowBatch(
        context=context,
        anchors=padded_anchors,
        last_tokens=last_tokens,
        labels=labels,
        following=following,
        reached=reached,
    )


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How batches are drawn.

    Attributes:
        rows_per_batch: B.
        anchors_per_row: A, at most.
        window: W.
        seed: of everything drawn.
        batches_per_pool: how many batches' rows are drawn at once and sorted by length, to keep padding small.
    """

    rows_per_batch: int = 16
    anchors_per_row: int = 32
    window: int = 8
    seed: int = 0
    batches_per_pool: int = 16

    def __post_init__(self) -> None:
        """Reject sizes that are not positive."""
        for name in ("rows_per_batch", "anchors_per_row", "window", "batches_per_pool"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected a positive integer, got {getattr(self, name)}")


class WindowStream:
    """An endless stream of batches over weighted sources, addressed by batch number."""

    def __init__(
        self, sources: Sequence[tuple[Sequence[AnswerRow], float]], labels_of: Tensor, config: StreamConfig
    ) -> None:
        """Make a stream.

        Args:
            sources: (rows, weight) for each source; weights say how many rows of a batch come from it.
            labels_of: [V] from `label_table`.
            config: how to draw.

        Raises:
            ValueError: a source is empty, or has a weight that is not positive.
        """
        if not sources or any(not rows or not weight > 0 for rows, weight in sources):
            got = [(len(rows), weight) for rows, weight in sources]
            raise InputError(f"sources: expected rows and a positive weight for each, got (rows, weight) = {got}")
        self.config = config
        self._sources = [rows for rows, _ in sources]
        self._labels_of = labels_of
        total = sum(weight for _, weight in sources)
        size = config.rows_per_batch * config.batches_per_pool
        ends = [round(size * sum(w for _, w in sources[: i + 1]) / total) for i in range(len(sources))]
        self._per_pool = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self._pool_number, self._pool = -1, []

    def batch(self, number: int) -> WindowBatch:
        """Return a batch by its number (any order; the same number always gives the same batch)."""
        rows = self._rows(number)
        generator = generator_of(self.config.seed, 1, number)
        anchors = [draw_anchors(row, self.config.anchors_per_row, generator) for row in rows]
        return pack(rows, anchors, window=self.config.window, labels_of=self._labels_of)

    def rows(self, number: int) -> list[AnswerRow]:
        """Return the rows of a batch."""
        return self._rows(number)

    def row_ids(self, number: int) -> list[str]:
        """Return the names of the rows of a batch."""
        return [row.id for row in self._rows(number)]

    def epochs(self, number: int) -> list[float]:
        """Return how often each source has been gone through before batch `number`."""
        pools = number / self.config.batches_per_pool
        return [pools * count / len(rows) for rows, count in zip(self._sources, self._per_pool, strict=True)]

    def _rows(self, number: int) -> list[AnswerRow]:
        pool_number, place = divmod(number, self.config.batches_per_pool)
        if pool_number != self._pool_number:
            self._pool_number, self._pool = pool_number, self._draw_pool(pool_number)
        return self._pool[place]

    def _draw_pool(self, pool_number: int) -> list[list[AnswerRow]]:
        rows: list[AnswerRow] = []
        for index, (source, count) in enumerate(zip(self._sources, self._per_pool, strict=True)):
            for cursor in range(pool_number * count, (pool_number + 1) * count):
                epoch, place = divmod(cursor, len(source))
                rows.append(source[self._order(index, epoch)[place]])
        rows.sort(key=lambda row: len(row.tokens))
        size = self.config.rows_per_batch
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        order = torch.randperm(len(batches), generator=generator_of(self.config.seed, 2, pool_number))
        return [batches[i] for i in order.tolist()]

    @lru_cache(maxsize=8)  # noqa: B019 - a handful of permutations, as long-lived as the stream
    def _order(self, source: int, epoch: int) -> list[int]:
        generator = generator_of(self.config.seed, 3 + source, epoch)
        return torch.randperm(len(self._sources[source]), generator=generator).tolist()


def generator_of(seed: int, stream: int, number: int) -> torch.Generator:
    """Return a generator that depends on all three numbers."""
    digest = hashlib.sha256(f"{seed}/{stream}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
