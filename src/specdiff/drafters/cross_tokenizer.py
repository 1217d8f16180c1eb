"""A drafter with another tokenizer than the target's: drafts go through text.

The committed text is encoded for the drafter, its draft is decoded and encoded for the target. The draft's q is lost on
the way (one text has many tokenizations), so it is verified without q; no probability of the drafter is ever used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from specdiff.drafters.base import Drafter, DraftRequest, Observation
from specdiff.drafters.retokenize import LONGEST_HALF, TextCodec
from specdiff.drafters.vocabulary import control_tokens
from specdiff.errors import PairingError
from specdiff.trees.paths import descend, leaf_paths
from specdiff.trees.sampled import merge
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
    TokenTree,
)


class CrossTokenizerDrafter:
    """Lets any drafter draft for a target with another tokenizer.

    Control tokens (EOS, chat roles) pass from one side to the other where both tokenizers have one of the same name;
    others are left out of what the drafter sees, and end its draft.

    Args:
        inner: drafts in its own tokens; must not read target features, whose positions are the target's tokens.
        target_tokenizer: the target's tokenizer.
        drafter_tokenizer: the tokenizer of ``inner``.
        vocab_size: V, the target's.
        name: used in records; by default the inner drafter's.

    Raises:
        PairingError: ``inner`` reads target features.
    """

    def __init__(
        self,
        inner: Drafter,
        *,
        target_tokenizer: PreTrainedTokenizerBase,
        drafter_tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        name: str = "",
    ) -> None:
        if inner.feature_layers:
            raise PairingError.of(
                "drafter",
                expected="one that reads no target features, across tokenizers",
                got=inner.name,
                remedy="use a drafter with the target's tokenizer",
            )
        target_control, drafter_control = control_tokens(target_tokenizer), control_tokens(drafter_tokenizer)
        common = set(target_control.values()) & set(drafter_control.values())
        self.inner = inner
        self.target = TextCodec(target_tokenizer, hidden={i for i, t in target_control.items() if t not in common})
        self.drafter = TextCodec(drafter_tokenizer)
        self.ends = frozenset(i for i, t in drafter_control.items() if t not in common)
        self.name, self.vocab_size = name or inner.name, vocab_size
        self.max_gamma: int | None = None
        self.feature_layers: tuple[int, ...] = ()

    def provenance(self, budget: Budget) -> Provenance:
        """FIXED, whatever the inner draft is.

        Raises:
            InputError: the inner drafter cannot build the shape.
        """
        self.inner.provenance(self.inner_budget(budget, 1.0))
        return Provenance.FIXED

    def inner_budget(self, budget: Budget, ratio: float) -> Budget:
        """The budget in the drafter's tokens, of which ``ratio`` make one of the target's."""
        gamma, shape = max(1, math.ceil(budget.gamma * ratio)), budget.shape
        if self.inner.max_gamma is not None:
            gamma = min(gamma, self.inner.max_gamma)
        if isinstance(shape, BestFirst):
            shape = BestFirst(max(1, math.ceil(shape.nodes * ratio)))
        return replace(budget, gamma=gamma, shape=shape)

    def open(self, rows: int) -> CrossTokenizerSession:
        """Start a session for ``rows`` requests."""
        return CrossTokenizerSession(self, rows)


@dataclass
class _Line:
    """One row's text in the drafter's ids.

    Attributes:
        ids: the drafter's. read: the target's tokens that they stand for: all but half a character's at the end.
        draft: the inner drafter's last draft.
    """

    ids: list[int] = field(default_factory=list)
    read: int = 0
    draft: Draft | None = None


class CrossTokenizerSession:
    """The texts of one batch over an inner session."""

    def __init__(self, drafter: CrossTokenizerDrafter, rows: int) -> None:
        self._drafter, self._inner = drafter, drafter.inner.open(rows)
        self._lines = [_Line() for _ in range(rows)]

    @property
    def passes(self) -> int:
        """Forward passes of the inner drafter so far."""
        return self._inner.passes

    def observe(self, observations: Sequence[Observation]) -> None:
        """Hand on prompts; what is committed later is read by the next round."""
        prompts = [o for o in observations if o.start == 0 and o.tokens]
        for o in prompts:
            self.rewind(o.row, 0)
        self._read({o.row: o.tokens for o in prompts})

    def rewind(self, row: int, length: int) -> None:
        """Read the row's text anew."""
        self._lines[row] = _Line()
        self._inner.rewind(row, 0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Read what was committed, ask the inner drafter, and put its drafts into the target's tokens."""
        prefixes = {r.row: tuple(r.prefix.tolist()) for r in requests}
        self._read(prefixes)
        asked = [self._inner_request(r) for r in requests if self._lines[r.row].ids]
        inner = self._inner.propose(asked) if asked else []
        drafts = {r.row: draft for r, draft in zip(asked, inner, strict=True)}
        for row, draft in drafts.items():
            self._lines[row].draft = draft
        return [self._translated(r, prefixes[r.row], drafts.get(r.row)) for r in requests]

    def _inner_request(self, request: DraftRequest) -> DraftRequest:
        line = self._lines[request.row]
        budget = self._drafter.inner_budget(request.budget, len(line.ids) / max(line.read, 1))
        return replace(request, prefix=torch.tensor(line.ids, dtype=torch.int64), budget=budget)

    def _read(self, prefixes: dict[int, tuple[int, ...]]) -> None:
        """Bring the drafter's ids of some rows up to the target's, and tell the inner drafter."""
        observations = [o for row, prefix in prefixes.items() if (o := self._read_row(row, prefix)) is not None]
        if observations:
            self._inner.observe(observations)

    def _read_row(self, row: int, prefix: tuple[int, ...]) -> Observation | None:
        line, old = self._lines[row], self._lines[row].ids
        line.read, line.ids = self._encoded(line, prefix)
        draft, line.draft = line.draft, None
        if not old:
            return Observation(row=row, start=0, tokens=tuple(line.ids[:-1]), accepted=0) if line.ids else None
        common = _common(old, line.ids)
        if common < len(old):
            self._inner.rewind(row, common)
        if common == len(line.ids):
            return None
        new = tuple(line.ids[common:])
        accepted = 0
        if draft is not None and common == len(old):
            accepted = len(descend(draft.tree.tokens.tolist(), draft.tree.parents, new))
        return Observation(row=row, start=common, tokens=new, accepted=accepted)

    def _encoded(self, line: _Line, prefix: tuple[int, ...]) -> tuple[int, list[int]]:
        """How many of the prefix's tokens are whole text, and the drafter's ids of that text."""
        target, drafter = self._drafter.target, self._drafter.drafter
        used, added = target.whole_text(prefix[: line.read], prefix[line.read :])
        end = line.read + used
        if used == 0:
            if len(prefix) - line.read < LONGEST_HALF:
                return line.read, line.ids
            end = len(prefix)
        ids = drafter.appended(line.ids, added) if line.read and used else None
        return end, ids if ids is not None else [*drafter.start, *drafter.ids(target.text(prefix[:end]))]

    def _translated(self, request: DraftRequest, prefix: tuple[int, ...], draft: Draft | None) -> Draft:
        """The draft in the target's tokens, one tree of all its paths."""
        budget, line = request.budget, self._lines[request.row]
        chains = (
            []
            if draft is None
            else [
                self._target_tokens(line, prefix, [int(draft.tree.tokens[n]) for n in path])[: budget.gamma]
                for path in leaf_paths(draft.tree.parents)
            ]
        )
        tokens, parents, _ = merge(chains)
        limit = node_limit(budget)  # one text may take more of the target's tokens than of the drafter's
        tree = TokenTree(torch.tensor(tokens[:limit], dtype=torch.int64), tuple(parents[:limit]))
        return Draft(tree, source=self._drafter.name)

    def _target_tokens(self, line: _Line, prefix: tuple[int, ...], path: list[int]) -> list[int]:
        ends = self._drafter.ends
        cut = next((i for i, token in enumerate(path) if token in ends), len(path))
        _, added = self._drafter.drafter.whole_text(line.ids, path[:cut])
        if not added:
            return []
        new = self._drafter.target.following(prefix[: line.read], added)
        half = list(prefix[line.read :])  # the draft starts with the character whose first bytes are committed
        return new[len(half) :] if new[: len(half)] == half else []


def node_limit(budget: Budget) -> int:
    """Most nodes that a draft under this budget has."""
    gamma, shape = budget.gamma, budget.shape
    if isinstance(shape, BestFirst):
        return shape.nodes
    if isinstance(shape, Samples):
        return shape.k * gamma
    if isinstance(shape, Siblings):
        return sum(math.prod(shape.widths[: d + 1]) for d in range(min(gamma, len(shape.widths))))
    if isinstance(shape, CausalPaths):
        return shape.keep * gamma
    if isinstance(shape, StaticTree):
        return len(shape.within(gamma))
    if isinstance(shape, DynamicTree):
        return shape.nodes
    assert isinstance(shape, Chain)
    return gamma


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
