"""The pruned token lattice of a window: the few tokens a path may take at each position (DiffuSpec, arXiv 2510.02358).

At each position the smallest set of most probable tokens whose mass reaches a threshold is kept, at most so many, and
EOS always.

One deviation from the paper, which stops expanding after the first EOS *of the lattice*. EOS is kept at every position,
so that would be the first one; and since a sum of log-probabilities favours short paths, a path that ends in an
improbable EOS (-4.6) would beat twenty good tokens (-30). Here the lattice ends after the first EOS *of the raw argmax
draft*: where the drafter itself says that the text ends. That EOS is part of the lattice: a draft that begins with EOS
gives a lattice of one position, and the target may accept the end of the text. See `path_search` for how paths that end
earlier compare with others.

Shapes: G depth of the window, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specdiff.types import CausalPaths

_ROUNDING = 1e-6  # of sums of fp32 probabilities


@dataclass(frozen=True)
class Lattice:
    """Candidates by position.

    Attributes:
        tokens: target ids of each position's candidates, by falling log q; equal ones by column.
        log_q: natural logarithms of their probabilities, finite.
        ends: ids that end a path.
        generated: tokens before the first EOS of the raw draft, G where it has none; None where no EOS is known.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_q: tuple[tuple[float, ...], ...]
    ends: frozenset[int] = frozenset()
    generated: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def columns_of(ids: Sequence[int], vocab: Tensor | None, size: int) -> tuple[int, ...]:
    """Columns of the ids that can be drafted, each once.

    Args:
        ids: target ids. vocab: [W] sorted target ids of the columns, None where column = id.
        size: ids from there on have no column.
    """
    if vocab is None:
        return tuple(dict.fromkeys(i for i in ids if i < size))
    tokens = cast("list[int]", vocab.tolist())  # pyright: ignore[reportUnknownMemberType]
    places = {token: column for column, token in enumerate(tokens)}
    return tuple(dict.fromkeys(places[i] for i in ids if i in places))


def raw_length(rows: Tensor, eos: Sequence[int]) -> int:
    """Tokens before the first EOS of the draft that takes each position's most probable token; G where it has none.

    Args:
        rows: [G, W] logits or log-probabilities. eos: columns of EOS.
    """
    if not eos or not rows.numel():
        return len(rows)
    best = cast("list[int]", rows.argmax(dim=-1).tolist())  # pyright: ignore[reportUnknownMemberType]
    return next((i for i, column in enumerate(best) if column in eos), len(best))


def prune(
    log_probs: Tensor, shape: CausalPaths, vocab: Tensor | None = None, *, eos: Sequence[int] | None = None
) -> Lattice:
    """The lattice of a window's marginals.

    Tokens of probability zero are left out, EOS included. Where more than ``cap`` tokens are equally probable, those
    that `torch.topk` takes are kept: the same ones for the same rows.

    Args:
        log_probs: [G, W] log-probabilities of the window's positions.
        shape: mass and cap.
        vocab: [W] sorted target ids of the columns, None where column = id.
        eos: columns of the tokens that end a text (`columns_of`), beside ``cap`` where they are not among the most
            probable; None = not known, nothing ends a path.

    Returns:
        At most G positions; none for the empty window.
    """
    generated = None if eos is None else raw_length(log_probs, eos)
    columns = tuple(eos or ())
    if not log_probs.numel():
        return Lattice((), (), frozenset(), generated)
    if generated is not None:
        log_probs = log_probs[: generated + 1]
    top = torch.topk(log_probs, k=min(shape.cap, log_probs.shape[-1]), dim=-1)
    values = cast("list[list[float]]", top.values.tolist())  # pyright: ignore[reportUnknownMemberType]
    places = cast("list[list[int]]", top.indices.tolist())  # pyright: ignore[reportUnknownMemberType]
    ends = cast("list[list[float]]", log_probs[:, list(columns)].tolist())  # pyright: ignore[reportUnknownMemberType]
    kept = [
        _kept(sorted(zip(row, place, strict=True), key=_rank), list(zip(end, columns, strict=True)), shape.mass)
        for row, place, end in zip(values, places, ends, strict=True)
    ]
    ids = _ids([column for row in kept for _, column in row], vocab)
    tokens = tuple(tuple(ids[column] for _, column in row) for row in kept)
    ending = _ids(columns, vocab)
    return Lattice(
        tokens, tuple(tuple(value for value, _ in row) for row in kept), frozenset(ending.values()), generated
    )


def _rank(candidate: tuple[float, int]) -> tuple[float, int]:
    """Falling log q, then rising column."""
    return -candidate[0], candidate[1]


def _kept(ranked: list[tuple[float, int]], ends: list[tuple[float, int]], mass: float) -> list[tuple[float, int]]:
    """The smallest prefix of ``ranked`` that has the mass, and the ends."""
    kept: list[tuple[float, int]] = []
    total = 0.0
    for value, column in ranked:
        if value == -math.inf or total >= mass - _ROUNDING:
            break
        kept.append((value, column))
        total += math.exp(value)
    missing = [end for end in ends if end not in kept and end[0] > -math.inf]
    return sorted(kept + missing, key=_rank) if missing else kept


def _ids(columns: Sequence[int], vocab: Tensor | None) -> dict[int, int]:
    """Target id of each column."""
    if vocab is None:
        return {column: column for column in columns}
    found = cast("list[int]", vocab.cpu()[list(columns)].tolist())  # pyright: ignore[reportUnknownMemberType]
    return dict(zip(columns, found, strict=True))
