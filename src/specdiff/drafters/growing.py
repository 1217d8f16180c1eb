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

from specdiff.drafters.base import provenance_of
from specdiff.randomness import Cdf, Random
from specdiff.types import (
    BestFirst,
    Budget,
    Draft,
    DraftLaw,
    DynamicTree,
    Provenance,
    Samples,
    Siblings,
    StaticTree,
    TokenTree,
)

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
    if isinstance(shape, DynamicTree):
        return _dynamic(logits, shape, budget, source)
    if isinstance(shape, StaticTree) and not shape.sampled:
        return _ranked(logits, shape.within(budget.gamma), source)
    tree = _SampledTree(logits, budget.temperature)
    if isinstance(shape, StaticTree):
        return _drawn(tree, shape.within(budget.gamma), random, vocab, source)
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
    return tree.draft(provenance_of(budget.shape), vocab, paths, source)


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


def _levels(paths: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Nodes of a static tree, as `StaticTree.within` orders them, by depth."""
    levels: list[list[tuple[int, ...]]] = [[] for _ in range(max(map(len, paths)))]
    for path in paths:
        levels[len(path) - 1].append(path)
    return levels


def _drawn(
    tree: _SampledTree, paths: Sequence[tuple[int, ...]], random: Random, vocab: Tensor | None, source: str
) -> Grower:
    """A static tree of children drawn without replacement; a node that q has no token for is left out with all below.

    Which nodes there are below a child depends on its place among the draws, never on what was drawn.
    """
    nodes: dict[tuple[int, ...], int] = {(): -1}
    levels = _levels(paths)
    for level in levels:
        start, siblings = len(tree), dict[tuple[int, ...], list[int]]()
        for path in level:
            above = path[:-1]
            drawn = siblings.setdefault(above, [])
            if above not in nodes or len(drawn) == int(torch.count_nonzero(tree.q(nodes[above]).weights)):
                continue
            drawn.append(random.draw(tree.q(nodes[above]), without=drawn))
            nodes[path] = tree.add(nodes[above], drawn[-1])
        if level is not levels[-1] and len(tree) > start:
            yield from tree.evaluate(range(start, len(tree)))
    return tree.draft(Provenance.WITHOUT_REPLACEMENT, vocab, (), source)


def _ranked(logits: Tensor, paths: Sequence[tuple[int, ...]], source: str) -> Grower:
    """A static tree of most probable tokens; a rank beyond the vocabulary is left out with all below."""
    inner = {path[:-1] for path in paths}
    ranks = min(1 + max(path[-1] for path in paths), logits.numel())
    order: dict[tuple[int, ...], list[int]] = {(): logits.topk(ranks).indices.tolist()}
    evaluated: dict[tuple[int, ...], int] = {(): -1}
    place: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for level in _levels(paths):
        asked: Level = []
        rows: list[tuple[int, ...]] = []
        for path in level:
            above, rank = path[:-1], path[-1]
            if above not in place or rank >= ranks:
                continue
            place[path] = len(tokens)
            tokens.append(order[above][rank])
            parents.append(place[above])
            if path in inner:  # leaves are not evaluated
                evaluated[path] = len(evaluated) - 1
                asked.append((evaluated[above], tokens[-1]))
                rows.append(path)
        if asked:
            top = (yield asked).topk(ranks, dim=-1).indices.tolist()
            order |= dict(zip(rows, top, strict=True))
    return Draft(TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents)), source=source)


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
    return _chosen(best, source)


def _chosen(nodes: Sequence[_Candidate], source: str) -> Draft:
    """Candidates, each behind its parent, as a draft."""
    place = {id(c): node for node, c in enumerate(nodes)}
    parents = tuple(place.get(id(c.parent), -1) for c in nodes)
    tokens = torch.tensor([c.token for c in nodes], dtype=torch.int64)
    return Draft(TokenTree(tokens, parents), source=source)


def _dynamic(logits: Tensor, shape: DynamicTree, budget: Budget, source: str) -> Grower:
    """EAGLE-2: expand the ``top`` best nodes of each depth, then keep the ``nodes`` best of all that were met.

    A node's product is at most its parent's and the sort is stable, so those kept form a tree.
    """
    met: list[_Candidate] = []
    evaluated = 0
    beam = [_Candidate(None, -1, 0, 0.0)]
    logits = logits[None]
    for depth in range(1, budget.gamma + 1):
        children: list[_Candidate] = []
        for parent, row in zip(beam, logits, strict=True):
            children += _children([parent], row[None], shape.top, budget.temperature)
        met += children
        beam = sorted(children, key=lambda c: -c.log_product)[: shape.top]
        if not beam or depth == budget.gamma:
            break
        for c in beam:
            c.index = evaluated
            evaluated += 1
        logits = yield [(c.parent.index, c.token) for c in beam if c.parent]
    return _chosen(sorted(met, key=lambda c: -c.log_product)[: shape.nodes], source)


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


def advance(
    row: int, grower: Grower, logits: Tensor | None, levels: dict[int, Level], drafts: dict[int, Draft]
) -> None:
    """Let one row's tree grow; it then waits for the next level in ``levels``, or is finished in ``drafts``."""
    try:
        levels[row] = grower.send(logits)  # type: ignore[arg-type] - None starts a generator
    except StopIteration as finished:
        drafts[row] = finished.value


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature
