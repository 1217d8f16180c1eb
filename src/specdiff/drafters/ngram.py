"""Prompt lookup: what followed the last tokens before, follows them again (no model, no q).

The longest suffix of the text that occurred before is looked up, and what came after it is proposed. The index of a row
grows by the tokens committed since, never by a rescan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from specdiff.drafters.base import DraftRequest, Observation
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, TokenTree


class NgramDrafter:
    """Proposes continuations that the text already holds.

    A `Chain` is what followed the most recent occurrence of the longest suffix found. `BestFirst` holds several
    continuations: those of longer suffixes first, then the more frequent, then the more recent.

    Args:
        vocab_size: V, the target's.
        longest: longest suffix to look up, in tokens.
        shortest: shortest suffix that is trusted.
        occurrences: most recent occurrences of one suffix that a `BestFirst` tree looks at.
        name: used in records.
    """

    def __init__(
        self, *, vocab_size: int, longest: int = 3, shortest: int = 1, occurrences: int = 64, name: str = "ngram"
    ) -> None:
        if not 1 <= shortest <= longest:
            raise InputError.of(
                "shortest, longest",
                expected="1 <= shortest <= longest",
                got=(shortest, longest),
                remedy="look up suffixes of 1 to 3 tokens",
            )
        if occurrences < 1:
            raise InputError.of(
                "occurrences", expected="an integer >= 1", got=occurrences, remedy="look at one at least"
            )
        self.longest, self.shortest, self.occurrences = longest, shortest, occurrences
        self.name, self.vocab_size = name, vocab_size
        self.max_gamma: int | None = None
        self.feature_layers: tuple[int, ...] = ()

    def provenance(self, budget: Budget) -> Provenance:
        """FIXED; there is no q to sample from.

        Raises:
            InputError: the shape is a sampled one other than one chain.
        """
        if not isinstance(budget.shape, Chain | BestFirst):
            raise InputError.of(
                "shape",
                expected="Chain() or BestFirst(nodes) for n-gram lookup",
                got=budget.shape,
                remedy="an n-gram drafter has no q to sample several drafts from",
            )
        return Provenance.FIXED

    def open(self, rows: int) -> NgramSession:
        """Start a session for ``rows`` requests."""
        return NgramSession(self, rows)


class NgramSession:
    """One index a row."""

    passes = 0
    """There is no model."""

    def __init__(self, drafter: NgramDrafter, rows: int) -> None:
        self._drafter = drafter
        self._indices = [_SuffixIndex(drafter.shortest, drafter.longest) for _ in range(rows)]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One lookup a request; the empty draft where no suffix occurred before."""
        return [self._propose(r) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """The prefixes of the requests say all there is to know."""

    def rewind(self, row: int, length: int) -> None:
        """Index the row anew from its next prefix."""
        self._indices[row] = _SuffixIndex(self._drafter.shortest, self._drafter.longest)

    def _propose(self, request: DraftRequest) -> Draft:
        index, budget = self._indices[request.row], request.budget
        index.extend(request.prefix)
        if isinstance(budget.shape, BestFirst):
            matches = [index.matches(n, self._drafter.occurrences) for n in self._lengths]
            lines = [[index.continuation(end, budget.gamma) for end in ends] for ends in matches]
            tokens, parents = _best_of(lines, budget.shape.nodes)
        else:
            ends = next((found for n in self._lengths if (found := index.matches(n, 1))), [])
            tokens = index.continuation(ends[0], budget.gamma) if ends else []
            parents = list(range(-1, len(tokens) - 1))
        return Draft(TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents)), source=self._drafter.name)

    @property
    def _lengths(self) -> range:
        return range(self._drafter.longest, self._drafter.shortest - 1, -1)


class _SuffixIndex:
    """Where each n-gram of a text ends."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._text: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, prefix: torch.Tensor) -> None:
        """Index the tokens that the prefix [L] has beyond what is indexed."""
        text = self._text
        for token in prefix[len(text) :].tolist():
            text.append(token)
            for n in range(self._shortest, min(self._longest, len(text)) + 1):
                self._ends[tuple(text[-n:])].append(len(text))

    def matches(self, n: int, count: int) -> list[int]:
        """Ends of the ``count`` most recent earlier occurrences of the text's last n tokens, the most recent first."""
        if n > len(self._text):
            return []
        ends = self._ends[tuple(self._text[-n:])]  # the last one is the suffix itself
        return ends[-2 : -2 - count : -1]

    def continuation(self, end: int, gamma: int) -> list[int]:
        """``gamma`` tokens from ``end`` on; where the text runs out, what repeats goes on repeating (as in LZ77)."""
        text, period = self._text, len(self._text) - end
        return [text[end + j % period] for j in range(gamma)]


def _best_of(lines: Sequence[Sequence[Sequence[int]]], nodes: int) -> tuple[list[int], list[int]]:
    """The best ``nodes`` nodes of the trie of continuations.

    Args:
        lines: for each suffix length, the longest first, its continuations, the most recent first.
        nodes: how many nodes to keep.

    Returns:
        Tokens and parents of the nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    ranks: list[list[int]] = []  # of each node: suffix (0 = longest), - occurrences under it, order of discovery
    for suffix, found in enumerate(lines):
        for line in found:
            node = -1
            for token in line:
                parent, node = node, children.setdefault((node, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    ranks.append([suffix, 0, node])
                if ranks[node][0] == suffix:
                    ranks[node][1] -= 1
    # a node never ranks behind its descendants: they are found later, under suffixes as long at most, as often at most
    best = sorted(range(len(tokens)), key=ranks.__getitem__)[:nodes]
    place = {node: i for i, node in enumerate(best)} | {-1: -1}
    return [tokens[n] for n in best], [place[parents[n]] for n in best]
