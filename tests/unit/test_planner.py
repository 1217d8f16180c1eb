"""The planner: how many nodes pay, when no draft does, and what it may lose at most."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff.control.calibration import EDGES, Calibration, claimed
from specdiff.control.costs import CostTable
from specdiff.control.plan_file import load_plan, save_plan
from specdiff.control.planner import Plan, Planner, Prediction
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Draft, Round, Siblings, TokenTree, ids_tensor

COSTS = CostTable(
    contexts=(100, 1000),
    nodes=(0, 4, 8),
    target=((1.0, 1.2, 2.0), (2.0, 2.4, 4.0)),
    draft=(0.3, 0.6),
    rest=(0.1, 0.1),
    plain=(1.0, 2.0),
)
WIDE = Budget(gamma=8, shape=BestFirst(8))
PLAN = Plan(
    costs=COSTS,
    greedy=Prediction(budget=WIDE, tau=2.5, speedup=1.6, nodes=5.0),
    sampled=Prediction(budget=Budget(gamma=8, shape=Siblings((2, 1))), tau=1.5, speedup=0.9, nodes=4.0),
)


def chain_draft(scores: list[float]) -> Draft:
    """A chain with these scores."""
    tree = TokenTree(ids_tensor(range(len(scores))), tuple(range(-1, len(scores) - 1)))
    return Draft(tree, scores=tuple(scores))


def record(draft: Draft, accepted: int, start: int) -> Round:
    """A round over a chain that accepted so many."""
    return Round(
        proposed=draft.tree.depth,
        nodes=len(draft.tree),
        accepted=accepted,
        committed=accepted + 1,
        extra=None,
        rule="match",
        reason="",
        source="",
        drafter_passes=1,
        start=start,
        path=tuple(range(accepted)),
    )


def test_costs_are_linear_between_what_was_measured() -> None:
    assert COSTS.step(100) == COSTS.step(1) == 1.0
    assert COSTS.step(550) == pytest.approx(1.5)
    assert COSTS.step(1900) == pytest.approx(3.0)  # the last two go on
    assert COSTS.scoring(6, 100) == pytest.approx(1.6 + 0.1)
    assert COSTS.round(4, 550) == pytest.approx(0.45 + 1.8 + 0.1)
    assert COSTS.round(0, 100, drafted=False) == pytest.approx(1.1)
    assert CostTable.from_dict(json.loads(json.dumps(COSTS.to_dict()))) == COSTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": (100, 100)}, "rising"),
        ({"nodes": (1, 2, 3)}, "first entry of 0|rising"),
        ({"plain": (0.0, 1.0)}, "times in seconds"),
        ({"draft": (1.0,)}, "2 times"),
        ({"target": ((1.0, 1.0, 1.0),)}, "2 rows"),
        ({"rest": (math.nan, 0.1)}, "times in seconds"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CostTable.from_dict({**COSTS.to_dict(), **change})


def test_a_table_with_a_missing_part_is_refused() -> None:
    with pytest.raises(InputError, match="cost table"):
        CostTable.from_dict({"contexts": [1]})


def test_calibration_starts_at_the_prior_and_ends_at_what_was_seen() -> None:
    calibration = Calibration(claimed(), weight=10, keep=1.0)
    score = math.log(0.55)
    assert calibration.rate(score) == pytest.approx(math.sqrt(0.5 * 0.65))
    for i in range(1000):
        calibration.observe([score, math.log(0.001)], [0] if i % 4 == 0 else [])
    assert calibration.rate(score) == pytest.approx(0.25, abs=0.01)
    assert calibration.rate(math.log(0.001)) < 0.001
    assert calibration.rate(math.log(0.4)) == pytest.approx(math.sqrt(0.35 * 0.5))  # another bin
    assert calibration.expected([score, score])[1] == pytest.approx(2 * calibration.trust * calibration.rate(score))


def test_a_change_of_text_shows_within_a_few_rounds() -> None:
    calibration = Calibration(claimed())
    scores = [math.log(0.9), math.log(0.7), math.log(0.6)]
    before = calibration.expected(scores)[-1]
    for _ in range(4):
        calibration.observe(scores, [])
    assert calibration.expected(scores)[-1] < 0.45 * before
    for _ in range(12):
        calibration.observe(scores, [0, 1, 2])
    assert calibration.expected(scores)[-1] > 0.9 * before


def test_as_many_nodes_as_pay() -> None:
    """Expected acceptance by hand: rates 1 in the top bin and 0 below, so each node's worth is known."""
    rates = tuple(1.0 if i == len(EDGES) else 0.0 for i in range(len(EDGES) + 1))
    planner = Planner(COSTS, WIDE, rates)
    budget = planner.budget(100)
    assert budget is not None
    assert isinstance(budget.shape, BestFirst)
    assert budget.shape.size is not None
    sure, hopeless = math.log(0.99), math.log(0.01)
    assert budget.shape.size([sure] * 3 + [hopeless] * 5) == 3
    assert budget.shape.size([sure] * 8) == 8  # 0.2 a node at a worth of 1
    assert budget.shape.size([hopeless] * 8) == 0
    assert budget.shape.size([]) == 0


def test_room_and_shapes_without_scores() -> None:
    planner = Planner(COSTS, Budget(gamma=8, shape=Siblings((2, 1))), claimed())
    assert planner.budget(3) == Budget(gamma=3, shape=Siblings((2, 1)))
    assert planner.budget(0) is None


def test_it_stops_on_hopeless_text_and_comes_back_when_drafts_pay() -> None:
    planner = Planner(COSTS, WIDE, claimed())
    start = drafted = 0
    for _ in range(300):
        wish = planner.budget(100)
        drafted += wish is not None
        draft = chain_draft([math.log(0.9)] * 4 if wish else [])
        planner.observe(record(draft, 0, start), draft)
        start += 1
    assert drafted < 20
    after = 0
    for _ in range(300):
        wish = planner.budget(100)
        after += wish is not None
        draft = chain_draft([math.log(0.9)] * 4 if wish else [])
        planner.observe(record(draft, 4 if wish else 0, start), draft)
        start += 5 if wish else 1
    assert after > 200


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-6, 0)), min_size=1, max_size=200), st.floats(0, 4))
def test_what_is_lost_is_bounded_by_credit_and_interest(rounds: list[tuple[int, float]], opening: float) -> None:
    """Without scores the account is the loss itself: never below minus one hopeless round."""
    planner = Planner(COSTS, WIDE, claimed(), opening=opening, interest=0.02)
    start, balance = 50, 0.0
    for accepted, _ in rounds:
        wish = planner.budget(100)
        draft = replace(chain_draft([0.0] * 4), scores=()) if wish else chain_draft([])
        accepted = accepted if wish else 0
        if wish:
            balance += accepted + 1 - COSTS.round(4, start) / COSTS.step(start)
        planner.observe(record(draft, accepted, start), draft)
        start += accepted + 1
    worst = COSTS.round(4, start) / COSTS.step(start) - 1
    assert balance >= -(opening + 0.02 * len(rounds) + worst) - 1e-9


def test_a_setting_that_promises_nothing_starts_without_credit() -> None:
    assert PLAN.controller(PLAN.best(greedy=True).budget).account == 2.0
    assert PLAN.controller(PLAN.best(greedy=False).budget).account == 0.0


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path, names = tmp_path / "plans" / "a.json", {"target": "t", "threads": "1"}
    save_plan(path, PLAN, names)
    assert load_plan(path, names) == PLAN
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_plan_of_another_machine_or_damaged_is_refused(tmp_path: Path) -> None:
    path, names = tmp_path / "a.json", {"target": "t", "threads": "1"}
    with pytest.raises(InputError, match="specdiff tune"):
        load_plan(path, names)
    save_plan(path, PLAN, names)
    with pytest.raises(InputError, match=r"threads '2'.*threads '1'"):
        load_plan(path, {**names, "threads": "2"})
    text = path.read_text()
    for broken in (text[: len(text) // 2], "[]", "{}", text.replace('"BestFirst"', '"Other"')):
        path.write_text(broken)
        with pytest.raises(InputError, match="measure again"):
            load_plan(path, names)
    path.write_text(text.replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(InputError, match="format 1"):
        load_plan(path, names)


@pytest.mark.parametrize(
    "change",
    [{"opening": -1.0}, {"interest": math.inf}, {"limit": math.nan}, {"prior": (0.5,)}, {"prior": (2.0,) * 14}],
)
def test_a_plan_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(PLAN, **change)
