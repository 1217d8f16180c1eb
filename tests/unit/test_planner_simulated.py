"""The planner over whole texts, without models: near the best fixed setting, and never below the bound it promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff.control.base import Controller, FixedBudget
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.planner import INTEREST, OPENING, Planner
from specdiff.types import BestFirst, Budget, Siblings
from support.planning import (
    GOOD,
    HOPELESS,
    MIDDLING,
    NEVER,
    POOR,
    Outcome,
    Text,
    costs,
    decode,
    measured_prior,
    sized_menu,
)

MENU = sized_menu(costs(), prior=measured_prior(GOOD, MIDDLING, POOR))
TEXTS, TOKENS = 24, 128


def outcomes(make: Callable[[], Controller], text: Callable[[int], Text], tokens: int = TOKENS) -> list[Outcome]:
    return [decode(make(), MENU, text, tokens, seed) for seed in range(TEXTS)]


def speedup(found: list[Outcome]) -> float:
    return sum(o.plain for o in found) / sum(o.time for o in found)


def best_fixed(text: Text) -> float:
    def fixed(nodes: int) -> Callable[[], Controller]:
        return lambda: FixedBudget(Budget(gamma=8, shape=BestFirst(nodes)))

    return max(speedup(outcomes(fixed(nodes), lambda done: text)) for nodes in (4, 8, 12))


@pytest.mark.parametrize("text", [GOOD, MIDDLING], ids=["good", "middling"])
def test_near_the_best_fixed_setting_where_drafts_pay(text: Text) -> None:
    assert speedup(outcomes(lambda: Planner(MENU), lambda done: text)) >= 0.965 * best_fixed(text)


@pytest.mark.parametrize("text", [POOR, HOPELESS, NEVER], ids=["poor", "hopeless", "never"])
def test_never_far_below_plain_decoding(text: Text) -> None:
    found = outcomes(lambda: Planner(MENU), lambda done: text)
    assert min(o.speedup for o in found) >= 0.97
    assert best_fixed(text) < 1


def test_a_text_that_changes_is_noticed() -> None:
    def changing(done: int) -> Text:
        return HOPELESS if done // 150 % 2 else GOOD

    found = outcomes(lambda: Planner(MENU), changing, 450)
    assert speedup(found) > 1.05
    assert all(o.drafted > 10 for o in found)


def test_a_hard_start_does_not_end_drafting() -> None:
    found = outcomes(lambda: Planner(MENU), lambda done: GOOD if done > 200 else NEVER, 500)
    assert speedup(found) > 1.2


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([GOOD, MIDDLING, POOR, HOPELESS, NEVER]), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.floats(0, 4),
    st.floats(0, 0.05),
    st.tuples(st.floats(0, 1), st.floats(0.5, 2), st.floats(0, 0.3)),
    st.booleans(),
)
def test_what_is_lost_is_bounded_whatever_the_text_does(
    texts: list[Text], seed: int, opening: float, interest: float, times: tuple[float, float, float], whole: bool
) -> None:
    table = costs(*times)
    menu = sized_menu(table)
    if whole:
        arm = Arm(
            budget=Budget(gamma=8, shape=Siblings((3, 1, 1))),
            accepted=1.0,
            nodes=5.0,
            seconds=tuple(table.round(5, context) for context in table.contexts),
        )
        menu = Menu(costs=table, arms=(*menu.arms, arm), planned=Prediction(tau=2, speedup=1.3, nodes=5.0))
    found = decode(Planner(menu, opening, interest), menu, lambda done: texts[done // 40 % len(texts)], 160, seed)
    assert found.worst <= opening + interest * found.tokens + 1e-9


def test_the_bound_is_three_per_cent_of_128_tokens() -> None:
    assert OPENING + INTEREST * 128 <= 0.03 * 128
