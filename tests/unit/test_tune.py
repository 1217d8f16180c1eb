"""Tuning on tables: what it measures, and that its plan drives decoding without changing the text."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from specdiff.bench.round_costs import measure_costs
from specdiff.bench.tune import NODES, planned, tune
from specdiff.decoder import Generation, Settings, SpeculativeDecoder
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import InputError, PairingError
from specdiff.testing import ScriptedDrafter, TableMarginals, TableTarget
from specdiff.types import BestFirst, Chain, Siblings

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
    assert told[:2] == ["rounds after 8 tokens", "rounds after 16 tokens"]
    low, high = plan.greedy.costs.contexts
    assert high - low == 8  # the measurement's own growth is on both
    assert plan.greedy.costs.nodes == NODES
    row = plan.greedy.costs.target[0]
    assert row == pytest.approx([4.1] * len(NODES))  # 5 ticks a round; one is the draft's, where there is one
    assert plan.greedy.costs.plain == (5.0, 5.0)
    assert result.spread == 0
    kinds = {type(arm.budget.shape) for arm in plan.sampled.arms}
    assert kinds == {Chain, Siblings, BestFirst}
    assert {arm.budget.temperature for arm in plan.sampled.arms} == {0.7, 1.0, 1.3}
    for greedy in (True, False):
        menu = plan.menu(greedy=greedy)
        assert 1 <= menu.planned.tau <= 5
        assert list(menu.fixed) == sorted(menu.fixed, key=lambda item: -item[1].speedup)
        tuned = planned(decoder(), plan, greedy=greedy)
        first = tuned.generate(PROMPTS[0], max_new_tokens=40, temperature=0.0 if greedy else 1.0, seed=3)
        again = tuned.generate(PROMPTS[0], max_new_tokens=40, temperature=0.0 if greedy else 1.0, seed=3)
        assert isinstance(first, Generation)
        assert isinstance(again, Generation)
        assert first.tokens == again.tokens
        if greedy:
            plain = SpeculativeDecoder(decoder().target, None, None).generate(PROMPTS[0], max_new_tokens=40)
            assert isinstance(plain, Generation)
            assert first.tokens == plain.tokens


def test_a_rule_keeps_the_settings_it_is_exact_for() -> None:
    plan = tune(decoder(), PROMPTS, new_tokens=12, contexts=(8,), clock=ticking).plan
    for rule, kinds in (("block", {"block"}), ("walk", {"walk"}), ("without_replacement", None)):
        tuned = planned(decoder(Settings(rule=rule)), plan, greedy=False)
        result = tuned.generate(PROMPTS[0], max_new_tokens=30, temperature=1.0)
        assert isinstance(result, Generation)
        used = {r.rule for r in result.rounds if r.nodes}
        assert used <= (kinds or {"without_replacement"})
    with pytest.raises(PairingError):
        planned(decoder(Settings(rule="ratio")), replace(plan, greedy=plan.greedy), greedy=True)


def test_times_are_scaled_where_a_whole_cycle_was_slow() -> None:
    """Every second cycle takes ten times as long; the table is that of a quiet machine, never falling."""
    now = [0.0]
    looks = itertools.count()

    def clock() -> float:
        now[0] += 10.0 if (next(looks) // 200) % 2 else 1.0
        return now[0]

    costs = measure_costs(
        decoder(), MarginalDrafter(TableMarginals.random(V, 4, seed=4)), PROMPTS[0], {0.0: []}, nodes=(0, 1, 2),
        contexts=(8,), clock=clock, repeats=9,
    )  # fmt: skip
    row = costs[0.0].table.target[0]
    assert list(row) == sorted(row)
    assert row[-1] <= 50
    assert costs[0.0].spread > 0.15


def test_a_drafter_of_chains_is_tuned_as_well() -> None:
    drafter = ScriptedDrafter(lambda request: [1] * request.budget.gamma, vocab_size=V)
    pair = SpeculativeDecoder(TableTarget.random(V, seed=3), drafter, None)
    result = tune(pair, PROMPTS, new_tokens=12, contexts=(8,), clock=ticking)
    assert result.plan.greedy.planned.tau >= 1
    assert {type(arm.budget.shape) for arm in result.plan.greedy.arms} <= {Chain, BestFirst}
    assert result.plan.sampled.arms


def test_tuning_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="drafter"):
        tune(SpeculativeDecoder(TableTarget.random(V, seed=3), None, None), PROMPTS)
    with pytest.raises(InputError, match="prompts"):
        tune(decoder(), [])
