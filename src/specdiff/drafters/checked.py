"""What the loop requires of a drafter and of each draft before a target pass: drafters are other people's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter
from specdiff.errors import DrafterError, InputError, SpecdiffError
from specdiff.types import Budget, Draft, DraftLaw, Provenance, TokenTree

_MEMBERS = ("name", "vocab_size", "max_gamma", "feature_layers", "provenance", "open")

_SUM_TOLERANCE = 1e-3


def check_drafter(drafter: object) -> None:
    """Refuse what has not the members of a `Drafter`; None (no drafter) passes.

    Raises:
        InputError: naming what is missing.
    """
    missing = [] if drafter is None else [name for name in _MEMBERS if not hasattr(drafter, name)]
    if missing:
        raise InputError.of(
            "drafter",
            expected="a Drafter or None",
            got=f"{type(drafter).__name__} without {', '.join(missing)}",
            remedy="use one of specdiff.drafters, or write a class with these members",
        )


@contextmanager
def blaming(drafter: Drafter | None) -> Iterator[None]:
    """Whatever a drafter raises that is not one of ours becomes a `DrafterError`."""
    try:
        yield
    except SpecdiffError:
        raise
    except Exception as error:
        name = getattr(drafter, "name", type(drafter).__name__)
        raise DrafterError(f"drafter {name!r} raised {error!r}") from error


def declared_provenance(drafter: Drafter, budget: Budget) -> Provenance:
    """What the drafter says its drafts are.

    Raises:
        InputError: it cannot build the budget's shape.
        DrafterError: it raised something else, or named no provenance.
    """
    with blaming(drafter):
        provenance = drafter.provenance(budget)
    if not isinstance(provenance, Provenance):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DrafterError(f"drafter {drafter.name!r}: expected a Provenance, got {provenance!r}")
    return provenance


def check_draft(draft: object, *, gamma: int, vocab_size: int, declared: Provenance | None = None) -> Draft:
    """Return the draft if it is one and consistent in itself, and of the kind that the drafter declared.

    Args:
        draft: what a drafter returned.
        gamma: depth that was asked for.
        vocab_size: V of the target.
        declared: what `Drafter.provenance` said of this budget. The rule follows from it: chosen by a provenance that
            depends on the tokens drawn, rules that are exact one by one are not exact together.

    Raises:
        DrafterError: it is no `Draft`, too deep, has tokens outside the vocabulary or off the CPU, paths that are none,
            or a q that is no probability law over the target's (or its own declared) vocabulary.
    """
    if not isinstance(draft, Draft):
        raise DrafterError(f"drafter: expected a Draft, got {type(draft).__name__}")
    _check_kinds(draft)
    if draft.tree.tokens.device.type != "cpu":
        raise DrafterError(f"drafter: token ids must be on the CPU, got them on {draft.tree.tokens.device}")
    tokens = draft.tree.tokens.tolist()
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise DrafterError(f"drafter: token ids must be in [0, {vocab_size}), got {tokens}")
    if draft.tree.depth > gamma:
        raise DrafterError(f"drafter: depth {draft.tree.depth} exceeds the budget's gamma {gamma}")
    if draft.law is not None and tokens:
        _check_paths(draft, tokens)
        _check_law(draft, draft.law, vocab_size)
    if tokens and declared is not None and draft.provenance is not declared:
        raise DrafterError(f"drafter: declared {declared.value!r} drafts, got a {draft.provenance.value!r} one")
    return draft


def _check_kinds(draft: Draft) -> None:
    """Refuse parts of another type, which would fail far from here and by another name."""
    law = draft.law
    kinds: list[tuple[str, object, Any]] = [
        ("tree", draft.tree, TokenTree),
        ("law", law, DraftLaw | NoneType),
        ("generated", draft.generated, int | NoneType),
    ]
    if isinstance(law, DraftLaw):
        kinds += [("law.rows", law.rows, Tensor), ("law.vocab", law.vocab, Tensor | NoneType)]
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise DrafterError(f"drafter: expected {name} of type {kind}, got {type(value).__name__}")
    if isinstance(law, DraftLaw) and not all(isinstance(row, int) for row in law.row_of):
        raise DrafterError(f"drafter: row_of must be integers, got {law.row_of!r}")


def _check_vocab(vocab: Tensor, vocab_size: int) -> None:
    """Columns must be distinct: a repeated one would lose its share of q, and the law of the text with it."""
    if vocab.ndim != 1 or vocab.dtype != torch.int64 or vocab.numel() == 0:
        raise DrafterError(f"drafter: q columns must be ids [W] int64, got {vocab.dtype} {tuple(vocab.shape)}")
    if not (int(vocab[0]) >= 0 and int(vocab[-1]) < vocab_size and bool((vocab[1:] > vocab[:-1]).all())):
        raise DrafterError(f"drafter: q columns must be rising token ids in [0, {vocab_size}), each once")


def _check_paths(draft: Draft, tokens: list[int]) -> None:
    parents = draft.tree.parents
    if len(set(zip(parents, tokens, strict=True))) != len(tokens):
        raise DrafterError("drafter: two children of one node carry the same token; merge them, paths keep the count")
    if draft.provenance is Provenance.CHAIN and draft.paths != (tuple(range(len(tokens))),):
        raise DrafterError(f"drafter: a sampled chain has one path over all its nodes, got {draft.paths}")
    visited: set[int] = set()
    for path in draft.paths:
        for above, node in zip((-1, *path), path, strict=False):
            if not 0 <= node < len(tokens) or parents[node] != above:
                raise DrafterError(f"drafter: path {path} does not lead down the tree, whose parents are {parents}")
        visited.update(path)
    if draft.paths and len(visited) != len(tokens):
        raise DrafterError("drafter: some nodes lie on no path, so they were not drawn from q")


def _check_law(draft: Draft, law: DraftLaw, vocab_size: int) -> None:
    rows, nodes = law.rows, len(draft.tree)
    if rows.ndim != 2 or not rows.is_floating_point():
        raise DrafterError(f"drafter: q rows must be [M, W] probabilities, got {rows.dtype} {tuple(rows.shape)}")
    if law.vocab is not None:
        _check_vocab(law.vocab, vocab_size)
    width = vocab_size if law.vocab is None else law.vocab.numel()
    if rows.shape[1] != width:
        raise DrafterError(f"drafter: q rows must have {width} columns, one a token, got {rows.shape[1]}")
    if len(law.row_of) != nodes + 1 or not all(-1 <= r < rows.shape[0] for r in law.row_of):
        raise DrafterError(
            f"drafter: row_of must name one of {rows.shape[0]} q rows (or -1) for the root and each of {nodes} nodes, "
            f"got {law.row_of}"
        )
    if any(law.row_of[parent + 1] < 0 for parent in draft.tree.parents):
        raise DrafterError("drafter: every node that has children needs the q row that they were drawn from")
    sums = rows.sum(dim=-1, dtype=torch.float32).tolist()
    # NaN fails every comparison, so this refuses it too
    if not (all(abs(total - 1) <= _SUM_TOLERANCE for total in sums) and rows.amin().item() >= 0):
        worst = max(sums, key=lambda total: abs(total - 1) if total == total else float("inf"))
        raise DrafterError(
            "drafter: q rows must be probabilities (finite, not negative) that sum to 1 within "
            f"{_SUM_TOLERANCE}, got a sum of {worst:.6g} in {rows.dtype}; make them by a softmax in fp32"
        )
