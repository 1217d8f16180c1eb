"""Trees that grow level by level, for drafters that know a node's q only once the node has been evaluated.

A grower is a generator: it yields the nodes it wants evaluated, is sent their logits, and returns the draft. So the
algorithms stand here without a model, and a session can grow the trees of a whole batch in common passes.

Shapes: W draft vocabulary (column = token id), N nodes of the tree, n nodes of a level.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdiff.drafters.base import PROVENANCE
from specdiff.randomness import Cdf, Random
from specdiff.types import BestFirst, Budget, Draft, DraftLaw, Provenance, Samples, Siblings, TokenTree

Level = list[tuple[int, int]]
"""Nodes to evaluate, as (parent, token): a parent is the index of an evaluated node, in the order they were yielded;
-1 is the last committed token."""

Grower = Generator[Level, Tensor, Draft]
"""Yields a `Level`, is sent its logits [n, W], returns the draft."""


def grow(logits: Tensor, budget: Budget, random: Random, *, vocab: Tensor | None, source: str) -> Grower:
    """The grower of ``budget.shape``.

    Args:
        logits: [W] after the last committed token.
        budget: shape, depth and draft temperature.
        random: the draft stream.
        vocab: [W] = 0 .. W - 1 where the target has more tokens, else None.
        source: name of the drafter.
    """
    shape = budget.shape
    if isinstance(shape, BestFirst):
        return _best_first(logits, shape.nodes, budget, source)
    tree = _SampledTree(logits, budget.temperature)
    if isinstance(shape, Siblings):
        return _siblings(tree, shape.widths[: budget.gamma], random, vocab, source)
    return _paths(tree, shape.k if isinstance(shape, Samples) else 1, budget, random, vocab, source)


class _SampledTree:
    """The nodes so far and the q rows of those that have been evaluated."""

    def __init__(self, logits: Tensor, temperature: float) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._temperature = temperature
        self._rows: list[Tensor] = []
        self._row_of: dict[int, int] = {}
        self._cdfs: dict[int, Cdf] = {}
        self._learn([-1], logits[None])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def q(self, node: int) -> Cdf:
        """The law of the node's children, ready for many draws."""
        return self._cdfs[node]

    def evaluate(self, nodes: range) -> Generator[Level, Tensor, None]:
        """Ask for the q rows of a whole level; levels are asked for in node order, so index = node."""
        self._learn(nodes, (yield [(self.parents[n], self.tokens[n]) for n in nodes]))

    def _learn(self, nodes: Sequence[int], logits: Tensor) -> None:
        for node, row in zip(nodes, torch.softmax(_scaled(logits, self._temperature), dim=-1), strict=True):
            self._row_of[node] = len(self._rows)
            self._rows.append(row)
            self._cdfs[node] = Cdf(row)

    def draft(self, provenance: Provenance, vocab: Tensor | None, paths: Sequence[Sequence[int]], source: str) -> Draft:
        row_of = tuple(self._row_of.get(node, -1) for node in range(-1, len(self)))
        tree = TokenTree(torch.tensor(self.tokens, dtype=torch.int64), tuple(self.parents))
        law = DraftLaw(torch.stack(self._rows), row_of, vocab)
        return Draft(tree, provenance, law, tuple(map(tuple, paths)), source)


def _paths(tree: _SampledTree, k: int, budget: Budget, random: Random, vocab: Tensor | None, source: str) -> Grower:
    """K independent chains; chains that agree so far share their nodes, hence their q rows."""
    paths: list[list[int]] = [[] for _ in range(k)]
    children: dict[tuple[int, int], int] = {}
    for depth in range(1, budget.gamma + 1):
        start = len(tree)
        for path in paths:
            parent = path[-1] if path else -1
            token = random.draw(tree.q(parent))
            if (parent, token) not in children:
                children[parent, token] = tree.add(parent, token)
            path.append(children[parent, token])
        if depth < budget.gamma:
            yield from tree.evaluate(range(start, len(tree)))
    return tree.draft(PROVENANCE[type(budget.shape)], vocab, paths, source)


def _siblings(tree: _SampledTree, widths: Sequence[int], random: Random, vocab: Tensor | None, source: str) -> Grower:
    """``widths[d]`` children without replacement under every node of depth d; fewer where q has fewer tokens."""
    level = range(-1, 0)
    for depth, width in enumerate(widths, start=1):
        start = len(tree)
        for parent in level:
            q, siblings = tree.q(parent), []
            for _ in range(min(width, int(torch.count_nonzero(q.weights)))):
                siblings.append(random.draw(q, without=siblings))
                tree.add(parent, siblings[-1])
        level = range(start, len(tree))
        if depth < len(widths):
            yield from tree.evaluate(level)
    return tree.draft(Provenance.WITHOUT_REPLACEMENT, vocab, (), source)


@dataclass(eq=False)
class _Candidate:
    parent: _Candidate | None
    token: int
    depth: int
    log_product: float
    index: int = -1
    """Among the evaluated nodes; -1 for the root and until evaluated."""


def _best_first(logits: Tensor, nodes: int, budget: Budget, source: str) -> Grower:
    """The ``nodes`` nodes with the largest product of conditionals, found exactly.

    A node outside the best found so far can neither come back nor have a descendant among them, since products only
    fall along a path; so each level evaluates only those of its nodes that are among the best.
    """
    best: list[_Candidate] = []
    evaluated = 0
    level = [_Candidate(None, -1, 0, 0.0)]
    logits = logits[None]
    for depth in range(1, budget.gamma + 1):
        best = sorted([*best, *_children(level, logits, nodes, budget.temperature)], key=lambda c: -c.log_product)
        best = best[:nodes]  # the sort is stable, so parents stay before children of probability 1
        level = [c for c in best if c.depth == depth]
        if not level or depth == budget.gamma:
            break
        for c in level:
            c.index = evaluated
            evaluated += 1
        logits = yield [(c.parent.index, c.token) for c in level if c.parent]
    place = {id(c): node for node, c in enumerate(best)}
    parents = tuple(place.get(id(c.parent), -1) for c in best)
    return Draft(TokenTree(torch.tensor([c.token for c in best], dtype=torch.int64), parents), source=source)


def _children(level: Sequence[_Candidate], logits: Tensor, count: int, temperature: float) -> list[_Candidate]:
    """The best ``count`` children of a level, in falling order; those of probability zero are left out."""
    gains = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    ranked = gains.topk(min(count, gains.shape[-1]), dim=-1)
    above = torch.tensor([c.log_product for c in level], dtype=torch.float64, device=gains.device)
    products = (above[:, None] + ranked.values).flatten()
    top = products.topk(min(count, products.numel()))
    tokens = ranked.indices.flatten()[top.indices].tolist()
    width = ranked.indices.shape[-1]
    return [
        _Candidate(parent := level[flat // width], token, parent.depth + 1, product)
        for product, flat, token in zip(top.values.tolist(), top.indices.tolist(), tokens, strict=True)
        if product > -torch.inf
    ]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature
