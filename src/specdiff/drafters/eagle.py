"""EAGLE and EAGLE-2 as drafters: autoregression over the target's features.

Row i of the head holds the target's feature of position i and token i + 1. So the committed prefix of L tokens gives
L - 1 rows, all with true features, which stay in the head's cache; the last one's output is the predicted feature of
the last committed token and gives q of the first drafted one. A drafted node's row has its parent's *predicted*
feature; such rows leave the cache when the round is over, and accepted tokens are read again with the features that the
target itself found. A round makes one pass over what was committed since and one a further level: as many as the tree
is deep.

What the papers do, and what is done here:

* T = 0: the longest path of argmaxes in a tree of most probable tokens, in both.
* T > 0, EAGLE (arXiv 2401.15077): siblings drawn without replacement in its static tree, tested one by one. Here that
  is ``StaticTree(..., sampled=True)`` with the rule ``without_replacement`` and q at every node.
* T > 0, EAGLE-2 (arXiv 2406.16858): a tree of most probable tokens is tested with q = 1. Here such a tree carries no q
  and is walked, which is as exact and accepts the same: the p-mass of the children.

Rules that would need a q that a tree has not are refused.

Shapes: L tokens of a prefix, n new rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, Observation, provenance_of
from specdiff.drafters.growing import Grower, Level, advance, grow
from specdiff.drafters.tree_cache import Nodes
from specdiff.errors import DrafterError, InputError
from specdiff.models.cached_decoder import CachedDecoder, NewRows
from specdiff.models.eagle import EagleHead
from specdiff.models.supported import usable_context
from specdiff.sampling import check_finite
from specdiff.types import Budget, CausalPaths, Draft, Provenance, TokenTree

GAMMA = 6
"""Default largest depth: that of EAGLE-2's trees (EAGLE's are 5 deep)."""
_CHUNK = 512  # rows; bounds the mask and the activations of long prefixes
_NONE = torch.empty(0, dtype=torch.int64)


class EagleDrafter:
    """An `EagleHead` beside its target.

    Args:
        head: in the target's dtype.
        max_gamma: largest depth of a tree; None = any.
        name: used in records.

    Attributes:
        context: rows that the head's positions reach; see `specdiff.drafters.windowed`.
    """

    def __init__(self, head: EagleHead, *, max_gamma: int | None = GAMMA, name: str = "") -> None:
        if max_gamma is not None and max_gamma < 1:
            raise InputError.of("max_gamma", expected="an integer >= 1 or None", got=max_gamma, remedy="leave it out")
        self.head = head.eval()
        self.name = name or head.name
        self.vocab_size = head.vocab_size
        self.max_gamma = max_gamma
        self.feature_layers: tuple[int, ...] = head.feature_layers
        self.context = usable_context(head.decoder)

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
                remedy="use DynamicTree(nodes): it is the search by the head's own conditionals",
            )
        return provenance_of(budget.shape)

    def open(self, rows: int) -> EagleSession:
        """Start a session for ``rows`` requests."""
        return EagleSession(self, rows)


class EagleSession:
    """One batch: the head's cache over committed tokens, features still to be read, and the trees that grow.

    Attributes:
        passes: forward passes so far.
    """

    def __init__(self, drafter: EagleDrafter, rows: int) -> None:
        self._drafter, self._head, self._rows = drafter, drafter.head, rows
        self._decoder = CachedDecoder(drafter.head.decoder, rows)
        self._settled = [0] * rows
        self._features: list[list[Tensor]] = [[] for _ in range(rows)]  # of the committed positions, from 0 on
        self._nodes = [Nodes() for _ in range(rows)]
        self._outputs: list[Tensor] = [torch.empty(0)] * rows  # predicted features: of the root, then of the nodes
        self.passes = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        """Collect the target's features of committed positions; the next round's first pass reads them."""
        for o in observations:
            if o.start == 0:
                self.rewind(o.row, 0)
            if o.features is not None:
                self._features[o.row].append(o.features)

    def rewind(self, row: int, length: int) -> None:
        """Keep what is cached or known of the first ``length`` tokens: their first ``length`` - 1 rows."""
        self._drop_tree(row)
        kept = max(length - 1, 0)
        if self._features[row]:
            self._features[row] = [torch.cat(self._features[row])[:kept]]
        # the last row is read again: what it predicts starts the next draft
        self._settled[row] = min(self._settled[row], max(kept - 1, 0))
        self._decoder.cache.truncate(row, self._settled[row])

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Grow one tree a request. After a prompt of one token the target has no feature yet: the draft is empty."""
        drafts: dict[int, Draft] = {}
        known = [r for r in requests if r.prefix.numel() > 1]
        for r in requests:
            if r.prefix.numel() <= 1:
                drafts[r.row] = Draft(TokenTree(_NONE, ()), source=self._drafter.name)
        logits = self._settle({r.row: r.prefix for r in known})
        growers = {r.row: self._grow(logits[r.row], r) for r in known}
        levels: dict[int, Level] = {}
        for row, grower in growers.items():
            advance(row, grower, None, levels, drafts)
        while levels:
            rows, levels = self._evaluate(levels), {}
            for row, answer in rows.items():
                advance(row, growers[row], answer, levels, drafts)
        return [drafts[r.row] for r in requests]

    def _grow(self, logits: Tensor, request: DraftRequest) -> Grower:
        return grow(logits, request.budget, request.random, vocab=None, source=self._drafter.name)

    def _settle(self, prefixes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Forget the trees, read what was committed since; logits [V] after each prefix [L]."""
        fresh: dict[int, tuple[Tensor, Tensor]] = {}
        for row, prefix in prefixes.items():
            self._drop_tree(row)
            start = self._settled[row]
            tokens = prefix[start + 1 :]
            known = torch.cat(self._features[row]) if self._features[row] else torch.empty(0, self._head.hidden_size)
            if len(known) != prefix.numel() - 1:
                raise DrafterError(
                    f"drafter {self._drafter.name!r}: expected features of {prefix.numel() - 1} positions, got "
                    f"{len(known)}; hand every observation of the target on, with its features"
                )
            self._features[row] = [known]
            if len(tokens):
                fresh[row] = (tokens, known[start:])
        while fresh:
            chunk = {row: (t[:_CHUNK], f[:_CHUNK]) for row, (t, f) in fresh.items()}
            outputs = self._run({row: NewRows.causal(t) for row, (t, _) in chunk.items()}, chunk)
            for row, (tokens, _) in chunk.items():
                self._settled[row] += len(tokens)
                self._outputs[row] = outputs[row][-1:]
            fresh = {row: (t[_CHUNK:], f[_CHUNK:]) for row, (t, f) in fresh.items() if len(t) > _CHUNK}
        if not prefixes:
            return {}
        return dict(zip(prefixes, self._logits(torch.cat([self._outputs[row] for row in prefixes])), strict=True))

    def _evaluate(self, levels: Mapping[int, Level]) -> dict[int, Tensor]:
        """Add nodes to the trees of some rows in one pass; logits [n, V] of each row's."""
        grown = {row: self._nodes[row].grown(level) for row, level in levels.items()}
        inputs: dict[int, tuple[Tensor, Tensor]] = {}
        for row, level in levels.items():
            parents = torch.tensor([parent + 1 for parent, _ in level], device=self._outputs[row].device)
            inputs[row] = (torch.tensor([token for _, token in level]), self._outputs[row][parents])
        outputs = self._run({row: nodes.last(len(levels[row])) for row, nodes in grown.items()}, inputs)
        for row, nodes in grown.items():
            self._nodes[row] = nodes
            self._outputs[row] = torch.cat([self._outputs[row], outputs[row]])
        logits = self._logits(torch.cat([outputs[row] for row in levels]))
        return dict(zip(levels, logits.split([len(level) for level in levels.values()]), strict=True))

    def _run(self, new: Mapping[int, NewRows], inputs: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """One pass; predicted features [n, H] of each row's new rows, which stay in the cache."""
        entries = [new.get(row, NewRows.causal(_NONE)) for row in range(self._rows)]
        size = max(e.tokens.numel() for e in entries)
        like = self._head.fc.weight
        embeds = torch.zeros(self._rows, size, self._head.hidden_size, dtype=like.dtype, device=like.device)
        for row, (tokens, features) in inputs.items():
            embeds[row, : len(tokens)] = self._head.embed(tokens.to(like.device), features.to(like.device))
        hidden = self._decoder.run(entries, inputs_embeds=embeds).last_hidden_state
        self._decoder.keep([range(e.tokens.numel()) for e in entries])
        self.passes += 1
        return {row: hidden[self._decoder.place(row), : rows.tokens.numel()] for row, rows in new.items()}

    def _logits(self, features: Tensor) -> Tensor:
        logits = self._head.logits(features)[:, : self._drafter.vocab_size]
        check_finite(logits, f"drafter {self._drafter.name!r}")
        return logits

    def _drop_tree(self, row: int) -> None:
        if self._nodes[row].tokens:
            self._nodes[row] = Nodes()
            self._outputs[row] = self._outputs[row][:1]
            self._decoder.cache.truncate(row, self._settled[row])
