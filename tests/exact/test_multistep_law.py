"""Several denoising steps: the law of the committed text, by enumeration.

From left to right the recorded q is exact, group by group; in any other order it is not, and the same rules would
change the law of the text. That is why those drafts carry no q.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdiff.drafters.base import DraftRequest
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.multistep import ORDERS, MultiStepDrafter, group_sizes
from specdiff.errors import PairingError
from specdiff.models.diffusion import Window
from specdiff.randomness import Random
from specdiff.types import Budget, Chain, Draft, DraftLaw, Provenance, TokenTree
from specdiff.verify.base import Rule, check
from specdiff.verify.block import Block
from specdiff.verify.point_mass import PointMass
from specdiff.verify.ratio import Ratio
from specdiff.verify.walk import Walk
from support.table_denoiser import TableDenoiser

from .enumeration import Table, distance, drafts_of, run
from .families import dirichlet, prefixes, tensor

VOCAB = 3
PREFIX = torch.tensor([1, 0])
CASES = [(gamma, steps) for gamma in (1, 2, 3) for steps in range(1, gamma + 2)]


def target(gamma: int, seed: int = 0) -> Table:
    """A random target with a row for every prefix."""
    import random

    rng = random.Random(seed)
    return Table({p: tensor(dirichlet(rng, VOCAB, 0.7)) for p in prefixes(VOCAB, gamma + 1)}, gamma + 1)


def source(seed: int) -> MaskedSource:
    """A table denoiser over three tokens and a mask."""
    return MaskedSource(TableDenoiser(VOCAB, seed=seed), vocab_size=VOCAB)


def production(
    gamma: int, steps: int, order: str, seed: int = 0, temperature: float = 1.0
) -> Callable[[Random], Draft]:
    """The production drafter as a program over random decisions."""
    drafter = MultiStepDrafter(source(seed), steps=steps, order=order)
    budget = Budget(gamma=gamma, shape=Chain(), temperature=temperature)

    def sample(random: Random) -> Draft:
        session = drafter.open(1)
        (draft,) = session.propose([DraftRequest(row=0, prefix=PREFIX, budget=budget, random=random)])
        assert draft.provenance is drafter.provenance(budget)
        return draft

    return sample


def claimed(gamma: int, steps: int, order: str, seed: int = 0) -> Callable[[Random], Draft]:
    """What must not be done: tokens drawn in this order, with the rows they were drawn from recorded as q."""
    drafter = source(seed)

    def sample(random: Random) -> Draft:
        session = drafter.open(1)
        tokens = torch.full((gamma,), VOCAB)
        hidden, rows = list(range(gamma)), [torch.empty(0)] * gamma
        for count in group_sizes(gamma, steps):
            probs = session.denoise([Window(0, PREFIX, tokens)])[0].softmax(dim=-1)
            picked = [hidden[i] for i in ORDERS[order](probs[hidden], count, random)]
            for position in picked:
                rows[position] = probs[position]
                tokens[position] = random.draw(probs[position])
            hidden = [p for p in hidden if p not in picked]
        tree = TokenTree(tokens, tuple(range(-1, gamma - 1)))
        law = DraftLaw(torch.stack(rows), (*range(gamma), -1), drafter.vocab)
        return Draft(tree, Provenance.CHAIN, law, (tuple(range(gamma)),))

    return sample


@pytest.mark.parametrize("rule", [Ratio(), Block()], ids=lambda r: r.name)
@pytest.mark.parametrize(("gamma", "steps"), CASES)
def test_left_to_right_is_exact(gamma: int, steps: int, rule: Rule, figure: Callable[..., None]) -> None:
    for seed in range(3):
        law = target(gamma, seed)
        drafts = drafts_of(production(gamma, steps, "left_to_right", seed, temperature=0.8))
        assert abs(sum(weight for weight, _ in drafts) - 1) < 1e-12
        result = run(rule, drafts, law)
        error = distance(result, law)[0]
        assert error < 1e-12
        assert result.accepted > 0
        figure(1, f"{steps} steps, gamma {gamma}", rules=[rule.name], laws=1, runs=result.runs, max_error=error)


@pytest.mark.parametrize(("gamma", "steps"), CASES)
def test_left_to_right_rows_are_the_conditionals(gamma: int, steps: int) -> None:
    """The probability of a draft is the product of its q rows, and no row depends on a token that comes later."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for weight, draft in drafts_of(production(gamma, steps, "left_to_right")):
        assert draft.law is not None
        tokens = draft.tree.tokens.tolist()
        product = 1.0
        for depth, token in enumerate(tokens):
            row = draft.law.rows[draft.law.row_of[depth]]
            product *= float(row[token])
            assert torch.equal(rows.setdefault(tuple(tokens[:depth]), row), row)
        assert abs(product - weight) < 1e-12


@pytest.mark.parametrize("order", ["confidence", "entropy", "margin", "random"])
def test_other_orders_with_a_recorded_q_change_the_law(order: str) -> None:
    """Ratio and block verification of such drafts are off by more than a hundredth in total variation."""
    worst = {"ratio": 0.0, "block": 0.0}
    for seed in range(6):
        law = target(2, seed)
        drafts = drafts_of(claimed(2, 2, order, seed))
        for rule in (Ratio(), Block()):
            worst[rule.name] = max(worst[rule.name], distance(run(rule, drafts, law), law)[1])
    assert min(worst.values()) > 0.01


def test_the_same_construction_from_left_to_right_is_exact() -> None:
    """The check above measures the order, not the construction."""
    law = target(2)
    assert distance(run(Ratio(), drafts_of(claimed(2, 2, "left_to_right")), law), law)[0] < 1e-12


@pytest.mark.parametrize("order", ["confidence", "entropy", "margin", "random"])
def test_other_orders_carry_no_q_and_rules_that_need_it_refuse(order: str) -> None:
    budget = Budget(gamma=2, shape=Chain())
    provenance = MultiStepDrafter(source(0), steps=2, order=order).provenance(budget)
    assert provenance is Provenance.FIXED
    for rule in (Ratio(), Block()):
        with pytest.raises(PairingError, match=rule.name):
            check(rule, provenance, greedy=False)
    law = target(2)
    drafts = drafts_of(production(2, 2, order))
    assert all(draft.law is None for _, draft in drafts)
    for rule in (Walk(), PointMass()):
        assert distance(run(rule, drafts, law), law)[0] < 1e-12


def test_one_step_is_the_one_step_drafter() -> None:
    """The same programs: the same decisions, the same drafts, the same rows."""
    budget = Budget(gamma=3, shape=Chain(), temperature=0.8)
    one = MarginalDrafter(source(0))

    def sample(random: Random) -> Draft:
        return one.open(1).propose([DraftRequest(row=0, prefix=PREFIX, budget=budget, random=random)])[0]

    expected = drafts_of(sample)
    for order in ORDERS:
        got = drafts_of(production(3, 1, order, temperature=0.8))
        assert len(got) == len(expected) == VOCAB**3
        for (weight, draft), (other_weight, other) in zip(got, expected, strict=True):
            assert weight == other_weight
            assert torch.equal(draft.tree.tokens, other.tree.tokens)
            assert draft.law is not None
            assert other.law is not None
            assert torch.equal(draft.law.rows, other.law.rows)
