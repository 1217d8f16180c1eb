"""The q that a drafter hands over is the law its tokens were drawn from, at every draft temperature.

A rule that uses q is exact for that law only. All outcomes of the production builders are enumerated, and each one's
probability is compared with the one that the draft's own rows give it. Source: verification.md, "the q handed to the
verifier".
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exact.enumeration import outcomes
from specdiff.drafters.marginal import build
from specdiff.randomness import Random
from specdiff.types import Budget, Chain, Draft, Samples, Shape, Siblings

V, GAMMA = 4, 2
SHAPES: tuple[Shape, ...] = (Chain(), Samples(2), Siblings((2, 1)), Siblings((1, 3)))


def logits() -> Tensor:
    return torch.randn(GAMMA, V, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def row_below(draft: Draft, node: int, vocab: Tensor | None) -> list[float]:
    """q of the children of a node, [V] over target ids."""
    assert draft.law is not None
    row = draft.law.rows[draft.law.row_of[node + 1]]
    if vocab is None:
        return row.tolist()
    dense = torch.zeros(int(vocab.max()) + 1, dtype=row.dtype)
    dense[vocab] = row
    return dense.tolist()


def claimed(draft: Draft, shape: Shape, vocab: Tensor | None) -> float:
    """Probability of the draws that made this draft, by its own q."""
    tokens, probability = draft.tree.tokens.tolist(), 1.0
    if isinstance(shape, Siblings):
        taken: dict[int, float] = {}
        for token, parent in zip(tokens, draft.tree.parents, strict=True):
            q = row_below(draft, parent, vocab)[token]
            probability *= q / (1.0 - taken.get(parent, 0.0))
            taken[parent] = taken.get(parent, 0.0) + q
        return probability
    for path in draft.paths:
        above = -1
        for node in path:
            probability *= row_below(draft, above, vocab)[tokens[node]]
            above = node
    return probability


@pytest.mark.parametrize("vocab", [None, torch.tensor([1, 3, 4, 9])], ids=["all tokens", "a draft vocabulary"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drafts_are_drawn_from_the_q_they_carry(shape: Shape, temperature: float, vocab: Tensor | None) -> None:
    budget = Budget(gamma=GAMMA, shape=shape, temperature=temperature)

    def program(random: Random) -> Draft:
        return build(logits(), budget, random, vocab=vocab, source="test")

    total = 0.0
    expected = torch.softmax(logits() / temperature, dim=-1)
    for probability, draft in outcomes(program):
        assert math.isclose(probability, claimed(draft, shape, vocab), rel_tol=1e-12)
        assert draft.law is not None
        torch.testing.assert_close(draft.law.rows[:GAMMA], expected, rtol=1e-12, atol=0)
        total += probability
    assert math.isclose(total, 1.0, rel_tol=1e-12)
