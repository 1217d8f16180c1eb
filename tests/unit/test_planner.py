"""The planner: how many nodes pay, when no draft does, and what it may lose at most."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdiff.control.calibration import EDGES, Calibration, claimed
from specdiff.control.costs import CostTable, never_falling
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.plan import Plan
from specdiff.control.plan_file import load_plan, save_plan
from specdiff.control.planner import OPENING, Planner
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Chain, Draft, Round, Siblings, TokenTree, ids_tensor

COSTS = CostTable(
    contexts=(100, 1000),
    nodes=(0, 4, 8),
    target=((1.1, 1.3, 2.1), (2.1, 2.5, 4.1)),
    draft=(0.3, 0.6),
    plain=(1.0, 2.0),
)
WIDE = Budget(gamma=8, shape=BestFirst(8))
FIXED = Budget(gamma=8, shape=Siblings((2, 1)))
CHAIN = Budget(gamma=2, shape=Chain(), temperature=0.7)


def menu_of(*arms: Arm, speedup: float = 1.6, prior: tuple[float, ...] = ()) -> Menu:
    return Menu(costs=COSTS, arms=arms, planned=Prediction(tau=2.5, speedup=speedup, nodes=5.0), prior=prior)


TREE = Arm(budget=WIDE, accepted=1.5, nodes=5.0)
PAIR = Arm(budget=FIXED, accepted=0.9, nodes=3.0, seconds=(1.7, 3.4))
SHORT = Arm(budget=CHAIN, accepted=0.6, nodes=2.0, seconds=(1.5, 3.0))
PLAN = Plan(
    greedy=menu_of(TREE, prior=claimed()),
    sampled=replace(menu_of(PAIR, SHORT, TREE, speedup=0.9), fixed=(("x", Prediction(tau=2, speedup=1.2, nodes=3)),)),
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
    assert COSTS.scoring(6, 100) == pytest.approx(1.7)
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
        ({"draft": (math.nan, 0.1)}, "times in seconds"),
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


def test_times_never_fall() -> None:
    assert never_falling([1, 3, 2, 2, 5]) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 5])
    assert never_falling([3, 2, 1]) == [2, 2, 2]
    assert never_falling([]) == []


def test_as_many_nodes_as_pay() -> None:
    """Expected acceptance by hand: rates 1 in the top bin and 0 below, so each node's worth is known."""
    rates = tuple(1.0 if i == len(EDGES) else 0.0 for i in range(len(EDGES) + 1))
    planner = Planner(menu_of(TREE, prior=rates), opening=8.0)
    budget = planner.budget(100)
    assert budget is not None
    assert isinstance(budget.shape, BestFirst)
    assert budget.shape.size is not None
    sure, hopeless = math.log(0.99), math.log(0.01)
    assert budget.shape.size([sure] * 3 + [hopeless] * 5) == 3
    assert budget.shape.size([sure] * 8) == 8  # 0.2 a node at a worth of 1.6
    assert budget.shape.size([hopeless] * 8) == 0
    assert budget.shape.size([]) == 0


def test_a_tree_is_no_larger_than_the_account_can_pay() -> None:
    rates = (1.0,) * (len(EDGES) + 1)
    for opening in (0.5, 0.6, 0.9, 1.5):
        planner = Planner(menu_of(TREE, prior=rates), opening=opening)
        budget = planner.budget(100)
        assert budget is not None
        assert isinstance(budget.shape, BestFirst)
        assert budget.shape.size is not None
        size = budget.shape.size([-0.01] * 8)
        assert COSTS.round(size, 100) - 1 <= opening
        assert size == 8 or COSTS.round(size + 1, 100) - 1 > opening


def test_room_and_shapes_without_scores() -> None:
    planner = Planner(menu_of(PAIR))
    assert planner.budget(3) == replace(FIXED, gamma=3)
    assert planner.choice is PAIR
    assert planner.budget(0) is None
    assert planner.choice is None


def test_the_setting_with_the_best_rate_and_another_where_the_text_is_harder() -> None:
    """Gamma, shape and draft temperature come with the setting: 2.5 / 1.65, 1.9 / 1.7 and 1.6 / 1.5 at first."""
    planner = Planner(menu_of(TREE, PAIR, SHORT), opening=100.0, limit=100.0)
    start, chosen = 100, list[Budget]()
    for _ in range(6):
        budget = planner.budget(100)
        if budget is None:
            break
        chosen.append(budget)
        draft = chain_draft([-1.0] * 4)
        planner.observe(record(draft, 0, start), draft)
        start += 1
    assert isinstance(chosen[0].shape, BestFirst)
    assert budget is None  # nothing was ever accepted


def test_what_one_setting_shows_tells_of_the_others() -> None:
    planner = Planner(menu_of(replace(PAIR, accepted=1.2), replace(SHORT, accepted=0.9)), opening=50.0, limit=50.0)
    first = planner.budget(100)
    assert first == FIXED
    draft = replace(chain_draft([0.0] * 3), scores=())
    planner.observe(record(draft, 0, 100), draft)
    second = planner.budget(100)
    assert second == CHAIN
    assert second.temperature == 0.7


def test_a_draft_in_vain_is_charged_as_what_it_was() -> None:
    planner = Planner(menu_of(PAIR), opening=2.0)
    planner.budget(100)
    planner.observe(record(chain_draft([]), 0, 100), chain_draft([]))  # the drafter had nothing
    assert planner.account == pytest.approx(2.0 + 1 - 1.4)


def test_a_setting_that_promises_nothing_starts_without_credit() -> None:
    assert PLAN.controller(greedy=True)(WIDE).account == OPENING
    assert PLAN.controller(greedy=False)(FIXED).account == 0.0


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
    with pytest.raises(InputError, match=r"threads '2'.*threads '1'.*specdiff tune --again"):
        load_plan(path, {**names, "threads": "2"})
    text = path.read_text()
    for broken in (text[: len(text) // 2], "[]", "{}", text.replace('"best-first:8"', '"other:8"')):
        path.write_text(broken)
        with pytest.raises(InputError, match=r"measure again|shape: expected"):
            load_plan(path, names)
    path.write_text(text.replace('"format_version": 2', '"format_version": 9'))
    with pytest.raises(InputError, match="format 2"):
        load_plan(path, names)


@pytest.mark.parametrize(
    "change",
    [{"opening": -1.0}, {"interest": math.inf}, {"limit": math.nan}, {"temperature": 0.0}],
)
def test_a_plan_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(PLAN, **change)


@pytest.mark.parametrize(
    "change",
    [{"prior": (0.5,)}, {"prior": (2.0,) * 14}, {"arms": ()}, {"arms": (replace(TREE, seconds=(1.0, 1.0)),)}],
)
def test_a_menu_that_cannot_be_chosen_from_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(PLAN.greedy, **change)
    with pytest.raises(InputError):
        replace(TREE, accepted=-1.0)
