"""Tuning on tables: what it measures, and that its plan drives decoding without changing the text."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdiff.bench.tune import NODES, tune
from specdiff.decoder import Generation, Settings, SpeculativeDecoder
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import InputError
from specdiff.testing import ScriptedDrafter, TableMarginals, TableTarget
from specdiff.types import BestFirst

V = 8
PROMPTS = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]


def decoder(settings: Settings | None = None) -> SpeculativeDecoder:
    marginals = TableMarginals.random(V, 4, seed=4, scale=1.2)
    return SpeculativeDecoder(TableTarget.random(V, seed=3), MarginalDrafter(marginals), None, settings)


def ticking() -> float:
    return float(next(_TICKS))


_TICKS = itertools.count()


def test_a_plan_is_measured_and_decodes_the_same_text() -> None:
    told: list[str] = []
    result = tune(decoder(), PROMPTS, new_tokens=24, contexts=(8, 16), clock=ticking, progress=told.append)
    plan = result.plan
    assert told[0] == "costs of a round"
    assert plan.costs.contexts == (8, 16)
    assert plan.costs.nodes == NODES
    assert all(second == 1.0 for row in plan.costs.target for second in row)  # one tick a pass
    assert isinstance(plan.greedy.budget.shape, BestFirst)
    assert 1 <= plan.greedy.tau <= 5
    assert plan.sampled == result.sampled[0]
    assert list(result.sampled) == sorted(result.sampled, key=lambda p: -p.speedup)
    for greedy in (True, False):
        best = plan.best(greedy=greedy)
        tuned = decoder(Settings(budget=best.budget, controller=plan.controller))
        first = tuned.generate(PROMPTS[0], max_new_tokens=40, temperature=0.0 if greedy else 1.0, seed=3)
        again = tuned.generate(PROMPTS[0], max_new_tokens=40, temperature=0.0 if greedy else 1.0, seed=3)
        assert isinstance(first, Generation)
        assert isinstance(again, Generation)
        assert first.tokens == again.tokens
        if greedy:
            plain = SpeculativeDecoder(decoder().target, None, None).generate(PROMPTS[0], max_new_tokens=40)
            assert isinstance(plain, Generation)
            assert first.tokens == plain.tokens


def test_a_drafter_of_chains_is_tuned_as_well() -> None:
    drafter = ScriptedDrafter(lambda request: [1] * request.budget.gamma, vocab_size=V)
    pair = SpeculativeDecoder(TableTarget.random(V, seed=3), drafter, None)
    result = tune(pair, PROMPTS, new_tokens=12, contexts=(8,), clock=ticking)
    assert result.plan.greedy.tau >= 1
    assert result.sampled


def test_tuning_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="drafter"):
        tune(SpeculativeDecoder(TableTarget.random(V, seed=3), None, None), PROMPTS)
    with pytest.raises(InputError, match="prompts"):
        tune(decoder(), [])
