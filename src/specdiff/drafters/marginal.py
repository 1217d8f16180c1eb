"""Drafters that return the marginals of a whole window at once (one-step diffusion); how marginals become a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdiff.drafters.base import PROVENANCE, DraftRequest, DraftSession, Observation
from specdiff.randomness import Random
from specdiff.trees.best_first import best_first
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples


class MarginalSession(Protocol):
    """State of a marginal source for one batch."""

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        ...

    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """Logits [G, W] for each request, G <= ``budget.gamma``: row j predicts token j + 1 after the prefix."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Hear what was committed."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """Forget a row beyond its first ``length`` tokens, see `specdiff.drafters.base.DraftSession`."""
        ...


class MarginalSource(Protocol):
    """A model that predicts every position of a window independently, given the prefix.

    Attributes:
        name, vocab_size, max_gamma, feature_layers: see `specdiff.drafters.base.Drafter`.
        vocab: [W] sorted target ids of the logits' columns, None where column = id.
    """

    name: str
    vocab_size: int
    max_gamma: int | None
    feature_layers: tuple[int, ...]
    vocab: Tensor | None

    def open(self, rows: int) -> MarginalSession:
        """Start a session for ``rows`` requests."""
        ...


class MarginalDrafter:
    """A `MarginalSource` as a drafter: one pass, then a tree of the wished shape.

    Positions are independent given the prefix, so the marginals are the true left-to-right conditionals of the draft
    and sampled shapes carry an exact q (docs/rules.md, fact 1).
    """

    def __init__(self, source: MarginalSource) -> None:
        self.source = source
        self.name = source.name
        self.vocab_size = source.vocab_size
        self.max_gamma = source.max_gamma
        self.feature_layers = source.feature_layers

    def provenance(self, budget: Budget) -> Provenance:
        """Every shape can be built from marginals."""
        return PROVENANCE[type(budget.shape)]

    def open(self, rows: int) -> DraftSession:
        """Start a session for ``rows`` requests."""
        return _Session(self.source, rows)


class _Session:
    def __init__(self, source: MarginalSource, rows: int) -> None:
        self._source, self._inner = source, source.open(rows)

    @property
    def passes(self) -> int:
        return self._inner.passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = self._inner.logits(requests)
        return [
            build(logits, r.budget, r.random, vocab=self._source.vocab, source=self._source.name)
            for r, logits in zip(requests, rows, strict=True)
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def rewind(self, row: int, length: int) -> None:
        self._inner.rewind(row, length)


def build(logits: Tensor, budget: Budget, random: Random, *, vocab: Tensor | None, source: str) -> Draft:
    """Turn marginals into a draft of ``budget.shape``.

    Args:
        logits: [G, W] of the window.
        budget: shape and draft temperature.
        random: the draft stream.
        vocab: [W] sorted target ids of the columns, None where column = id.
        source: name of the drafter.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    shape = budget.shape
    if isinstance(shape, BestFirst):
        # the draft temperature reshapes the tree: lower = deeper, higher = wider
        return best_first(torch.log_softmax(logits / budget.temperature, dim=-1), shape.nodes, vocab, source=source)
    probs = torch.softmax(logits / budget.temperature, dim=-1)
    if isinstance(shape, Chain):
        return sample_chain(probs, random, vocab, source=source)
    if isinstance(shape, Samples):
        return sample_paths(probs, shape.k, random, vocab, source=source)
    return siblings_without_replacement(probs, shape.widths, random, vocab, source=source)
