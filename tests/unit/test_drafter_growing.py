"""Trees grown from a table of conditionals, without a model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specdiff.drafters.growing import Grower, grow
from specdiff.randomness import RandomStream, Uniforms, inverse_cdf
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Siblings
from support.drafting import line

W, TEMPERATURE = 5, 0.7


def conditional(path: tuple[int, ...], *, sharpness: float = 1.5) -> Tensor:
    """Logits [W] after ``path``."""
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(W, generator=generator, dtype=torch.float64) * sharpness


def run(grower: Grower, table=conditional) -> tuple[Draft, list[int]]:
    """Answer a grower from the table; the draft, and how many nodes each level evaluated."""
    evaluated: list[tuple[int, ...]] = []
    sizes: list[int] = []
    logits = None
    try:
        while True:
            level = grower.send(logits)
            for parent, token in level:
                assert parent < len(evaluated)
                evaluated.append((*(evaluated[parent] if parent >= 0 else ()), token))
            sizes.append(len(level))
            logits = torch.stack([table(path) for path in evaluated[-len(level) :]])
    except StopIteration as finished:
        return finished.value, sizes


def start(shape, gamma: int, random=None, table=conditional) -> tuple[Draft, list[int]]:
    budget = Budget(gamma=gamma, shape=shape, temperature=TEMPERATURE)
    return run(grow(table(()), budget, random or RandomStream(1, "draft"), vocab=None, source="table"), table)


@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 8, 60])
@pytest.mark.parametrize("sharpness", [0.3, 1.5, 6.0])
def test_best_first_holds_the_largest_products_of_all_paths(gamma: int, nodes: int, sharpness: float) -> None:
    def table(path: tuple[int, ...]) -> Tensor:
        return conditional(path, sharpness=sharpness)

    products = {
        path: math.prod(float(torch.softmax(table(path[:i]) / TEMPERATURE, -1)[token]) for i, token in enumerate(path))
        for depth in range(1, gamma + 1)
        for path in itertools.product(range(W), repeat=depth)
    }
    wanted = sorted(products, key=lambda p: -products[p])[:nodes]
    draft, sizes = start(BestFirst(nodes), gamma, table=table)
    found = [tuple(line(draft.tree.tokens, draft.tree.parents, n)) for n in range(len(draft.tree))]
    assert draft.provenance is Provenance.FIXED
    assert found == wanted  # in falling order, too
    assert len(sizes) <= gamma - 1
    assert all(size <= nodes for size in sizes)


def test_best_first_stops_when_no_deeper_node_can_be_among_the_best() -> None:
    draft, sizes = start(BestFirst(3), 6, table=lambda path: torch.zeros(W, dtype=torch.float64))
    assert draft.tree.depths == (1, 1, 1)
    assert sizes == [3]  # the first level was looked at; below it, nothing reached the best three


@pytest.mark.parametrize("k", [1, 2, 7])
def test_chains_are_drawn_from_the_rows_they_record(k: int) -> None:
    uniforms = torch.rand(4 * k, dtype=torch.float64, generator=torch.Generator().manual_seed(k)).tolist()
    draft, sizes = start(Samples(k) if k > 1 else Chain(), 4, Uniforms(uniforms))
    assert draft.provenance is (Provenance.IID if k > 1 else Provenance.CHAIN)
    assert len(sizes) == 3
    assert len(draft.paths) == k
    lines = [line(draft.tree.tokens, draft.tree.parents, path[-1]) for path in draft.paths]
    assert len({tuple(x) for x in lines}) == len({path[-1] for path in draft.paths})  # equal draws share nodes
    for draw, tokens in enumerate(lines):
        for depth, token in enumerate(tokens):
            q = torch.softmax(conditional(tuple(tokens[:depth])) / TEMPERATURE, -1)
            node = draft.paths[draw][depth - 1] if depth else -1
            assert draft.law is not None
            torch.testing.assert_close(draft.law.rows[draft.law.row_of[node + 1]], q, atol=0, rtol=0)
            assert token == inverse_cdf(q, uniforms[depth * k + draw])


@pytest.mark.parametrize("widths", [(1,), (3, 2, 1), (2, 2, 2, 2), (9, 1)])
def test_siblings_are_distinct_and_every_inner_node_has_its_row(widths: tuple[int, ...]) -> None:
    draft, sizes = start(Siblings(widths), 3)
    depth = min(3, len(widths))
    assert draft.provenance is Provenance.WITHOUT_REPLACEMENT
    assert draft.tree.depth == depth
    assert len(sizes) == depth - 1
    assert draft.law is not None
    for node in range(-1, len(draft.tree)):
        children = [c for c, parent in enumerate(draft.tree.parents) if parent == node]
        at = draft.tree.depths[node] if node >= 0 else 0
        if at == depth:
            assert draft.law.row_of[node + 1] == -1
            assert not children
        else:
            path = tuple(line(draft.tree.tokens, draft.tree.parents, node))
            q = torch.softmax(conditional(path) / TEMPERATURE, -1)
            torch.testing.assert_close(draft.law.rows[draft.law.row_of[node + 1]], q, atol=0, rtol=0)
            assert len(children) == len({int(draft.tree.tokens[c]) for c in children}) == min(widths[at], W)


def test_tokens_without_probability_are_never_drawn() -> None:
    def table(path: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.0, 1.0, -torch.inf, -torch.inf, -torch.inf], dtype=torch.float64)

    siblings, _ = start(Siblings((4, 4)), 2, table=table)
    best, _ = start(BestFirst(40), 2, table=table)
    assert len(siblings.tree) == len(best.tree) == 6
    assert set(siblings.tree.tokens.tolist()) == set(best.tree.tokens.tolist()) == {0, 1}
