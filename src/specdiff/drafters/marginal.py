"""Drafters that return the marginals of a whole window at once (one-step diffusion); how marginals become a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specdiff.drafters.base import PROVENANCE, DraftRequest, DraftSession, Observation
from specdiff.drafters.scoring import RowScorers, Scoring, check_scoring
from specdiff.errors import InputError
from specdiff.ngram.base import NgramScorer
from specdiff.randomness import Random
from specdiff.trees.best_first import best_first
from specdiff.trees.lattice import columns_of, raw_length
from specdiff.trees.path_search import causal_paths, check_scorer
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import (
    BestFirst,
    Budget,
    CausalPaths,
    Chain,
    Draft,
    DynamicTree,
    Provenance,
    Samples,
    Siblings,
    StaticTree,
)


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

    Args:
        source: the model.
        scorer: the n-gram model of `CausalPaths`, see `Scoring`; the other shapes do not ask it, nor does weight 1.
        eos_ids: target ids that end a text: paths end there, and drafts that are asked to say how long
            the raw draft is (`Budget.raw_length`); None = not known.

    Raises:
        InputError: the scorer is none, or learns but is not made for each row.
    """

    def __init__(
        self, source: MarginalSource, *, scorer: Scoring | None = None, eos_ids: Sequence[int] | None = None
    ) -> None:
        check_scoring(scorer)
        self.source, self.scorer = source, scorer
        self.eos = None if eos_ids is None else columns_of(eos_ids, source.vocab, source.vocab_size)
        self.name = source.name
        self.vocab_size = source.vocab_size
        self.max_gamma = source.max_gamma
        self.feature_layers = source.feature_layers

    def provenance(self, budget: Budget) -> Provenance:
        """Every shape but the trees of EAGLE, which ask what follows a drafted token, can be built from marginals.

        Raises:
            InputError: such a tree, or `CausalPaths` of weight < 1 without a scorer.
        """
        if isinstance(budget.shape, StaticTree | DynamicTree):
            raise InputError.of(
                "shape",
                expected="a shape other than StaticTree and DynamicTree for a drafter of independent positions",
                got=budget.shape,
                remedy="use BestFirst(nodes): it is the best tree there",
            )
        if isinstance(budget.shape, CausalPaths):
            check_scorer(budget.shape, self.scorer)
        return PROVENANCE[type(budget.shape)]

    def open(self, rows: int) -> DraftSession:
        """Start a session for ``rows`` requests."""
        return _Session(self, rows)


class _Session:
    def __init__(self, drafter: MarginalDrafter, rows: int) -> None:
        self._drafter, self._inner = drafter, drafter.source.open(rows)
        self._scorers = None if drafter.scorer is None else RowScorers(drafter.scorer, rows)

    @property
    def passes(self) -> int:
        return self._inner.passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = self._inner.logits(requests)
        return [self._build(r, logits) for r, logits in zip(requests, rows, strict=True)]

    def _build(self, request: DraftRequest, logits: Tensor) -> Draft:
        drafter, shape = self._drafter, request.budget.shape
        scorer, context = None, ()
        if self._scorers is not None and isinstance(shape, CausalPaths) and shape.weight < 1:
            scorer, context = self._scorers.at(request.row, request.prefix)
        return build(
            logits,
            request.budget,
            request.random,
            vocab=drafter.source.vocab,
            source=drafter.name,
            scorer=scorer,
            context=context,
            eos=drafter.eos,
        )

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def rewind(self, row: int, length: int) -> None:
        self._inner.rewind(row, length)
        if self._scorers is not None:
            self._scorers.rewind(row, length)


def build(
    logits: Tensor,
    budget: Budget,
    random: Random,
    *,
    vocab: Tensor | None,
    source: str,
    scorer: NgramScorer | None = None,
    context: Sequence[int] = (),
    eos: Sequence[int] | None = None,
) -> Draft:
    """Turn marginals into a draft of ``budget.shape``.

    Args:
        logits: [G, W] of the window.
        budget: shape and draft temperature.
        random: the draft stream.
        vocab: [W] sorted target ids of the columns, None where column = id.
        source: name of the drafter.
        scorer, context: of `CausalPaths`, see `specdiff.trees.path_search.search`.
        eos: columns of the tokens that end a text; None = not known.

    Raises:
        InputError: `CausalPaths` of weight < 1 without a scorer.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    shape = budget.shape
    if isinstance(shape, CausalPaths):
        # the draft temperature sharpens or flattens q: fewer or more candidates, more or less of q beside the n-gram
        log_probs = torch.log_softmax(logits / budget.temperature, dim=-1)
        return causal_paths(log_probs, shape, context, scorer, vocab, eos=eos, source=source)
    draft = _tree(logits, budget, random, vocab, source)
    if eos is None or not budget.raw_length:
        return draft
    return replace(draft, generated=raw_length(logits, eos))


def _tree(logits: Tensor, budget: Budget, random: Random, vocab: Tensor | None, source: str) -> Draft:
    shape = budget.shape
    if isinstance(shape, BestFirst):
        # the draft temperature reshapes the tree: lower = deeper, higher = wider
        log_probs = torch.log_softmax(logits / budget.temperature, dim=-1)
        return best_first(log_probs, shape.nodes, vocab, size=shape.size, source=source)
    probs = torch.softmax(logits / budget.temperature, dim=-1)
    if isinstance(shape, Chain):
        return sample_chain(probs, random, vocab, source=source)
    if isinstance(shape, Samples):
        return sample_paths(probs, shape.k, random, vocab, source=source)
    assert isinstance(shape, Siblings)
    return siblings_without_replacement(probs, shape.widths, random, vocab, source=source)
