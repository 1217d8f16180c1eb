"""A small causal language model as drafter (SpS: Leviathan et al. 2023, Chen et al. 2023), for chains and for trees.

Each round is one pass over the tokens committed since, whose last row is the q of the first position, then one pass a
further level of the tree: gamma passes. Every node has its own q row, since q is conditioned on the path down to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.drafters.base import DraftRequest, Observation, provenance_of
from specdiff.drafters.growing import Grower, Level, advance, grow
from specdiff.drafters.tree_cache import TreeCache
from specdiff.errors import InputError
from specdiff.models.supported import check_can_roll_back, usable_context
from specdiff.types import Budget, CausalPaths, Draft, Provenance


class AutoregressiveDrafter:
    """A transformers causal LM that shares the target's token ids.

    Args:
        model: a loaded model in any dtype, with ``sdpa`` or ``eager`` attention.
        vocab_size: V, the target's. Where the two models pad one vocabulary to different sizes, ids that only one of
            them has get q = 0; see `specdiff.drafters.vocabulary.check_same_vocabulary` for whether they share it.
        name: used in records.

    Attributes:
        context: tokens the model can hold; see `specdiff.drafters.windowed` for targets that hold more.

    Raises:
        UnsupportedModelError: the model's state cannot be rolled back, and why.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, name: str = "") -> None:
        check_can_roll_back(model)
        config = model.config.get_text_config()
        self.model = model.eval()
        self.name = name or f"autoregressive-{config.model_type}"
        self.vocab_size = min(vocab_size, int(config.vocab_size))
        self.vocab: Tensor | None = None if self.vocab_size == vocab_size else torch.arange(self.vocab_size)
        self.max_gamma: int | None = None
        self.feature_layers: tuple[int, ...] = ()
        self.context = usable_context(model)

    def provenance(self, budget: Budget) -> Provenance:
        """Every shape can be grown but `CausalPaths`.

        Raises:
            InputError: the shape is `CausalPaths`.
        """
        if isinstance(budget.shape, CausalPaths):
            raise InputError.of(
                "shape",
                expected="a shape other than CausalPaths for a drafter whose tokens know each other",
                got=budget.shape,
                remedy="use BestFirst(nodes): it is the search by the drafter's own conditionals",
            )
        return provenance_of(budget.shape)

    def open(self, rows: int) -> AutoregressiveSession:
        """Start a session for ``rows`` requests."""
        return AutoregressiveSession(self, rows)


class AutoregressiveSession:
    """One batch: its prefix caches and the trees that grow on them."""

    def __init__(self, drafter: AutoregressiveDrafter, rows: int) -> None:
        self._drafter = drafter
        self._cache = TreeCache(drafter.model, rows)

    @property
    def passes(self) -> int:
        """Forward passes so far, those over prompts included."""
        return self._cache.passes

    def observe(self, observations: Sequence[Observation]) -> None:
        """Read prompts; what is committed later is read by the next round's first pass."""
        prompts = {o.row: torch.tensor(o.tokens, dtype=torch.int64) for o in observations if o.start == 0 and o.tokens}
        if prompts:
            for row in prompts:
                self._cache.rewind(row, 0)
            self._cache.extend(prompts)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Grow one tree a request; rows that need fewer levels sit out the last passes."""
        logits = self._cache.extend({r.row: self._cache.settle(r.row, r.prefix) for r in requests})
        growers = {r.row: self._grow(logits[r.row], r) for r in requests}
        drafts: dict[int, Draft] = {}
        levels: dict[int, Level] = {}
        for row, grower in growers.items():
            advance(row, grower, None, levels, drafts)
        while levels:
            logits, levels = self._cache.evaluate(levels), {}
            for row, rows in logits.items():
                advance(row, growers[row], rows[:, : self._drafter.vocab_size], levels, drafts)
        return [drafts[r.row] for r in requests]

    def rewind(self, row: int, length: int) -> None:
        """Keep what is cached of the first ``length`` tokens."""
        self._cache.rewind(row, length)

    def _grow(self, logits: Tensor, request: DraftRequest) -> Grower:
        d = self._drafter
        return grow(logits[: d.vocab_size], request.budget, request.random, vocab=d.vocab, source=d.name)
