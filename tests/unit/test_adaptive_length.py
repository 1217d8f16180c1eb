"""Adaptive draft length against sequences worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdiff.control.adaptive_length import AdaptiveLength, LengthRule
from specdiff.control.base import FixedBudget
from specdiff.control.registry import get
from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import InputError
from specdiff.stopping import StopOptions
from specdiff.testing import TableMarginals, TableTarget, chain
from specdiff.types import BestFirst, Budget, CausalPaths, Chain, Draft, Round, Samples, Shape, Siblings, TokenTree

BUDGET = Budget(gamma=30, shape=Chain(), temperature=0.7)
EMPTY = Draft(TokenTree(torch.empty(0, dtype=torch.int64), ()))


def record(accepted: int) -> Round:
    return Round(
        proposed=30, nodes=30, accepted=accepted, committed=accepted + 1, extra=None, rule="match", reason="",
        source="", drafter_passes=1,
    )  # fmt: skip


def draft(generated: int | None) -> Draft:
    tree = chain([1]).tree
    return Draft(tree, generated=generated)


def lengths(controller: AdaptiveLength, rounds: list[tuple[int | None, int]], room: int = 1000) -> list[int]:
    """k of each round, and of the one after the last."""
    found: list[int] = []
    for generated, accepted in rounds:
        budget = controller.budget(room)
        assert budget is not None
        found.append(budget.gamma)
        controller.observe(record(accepted), draft(generated))
    return [*found, controller.length]


@pytest.mark.parametrize(
    ("rule", "rounds", "wanted"),
    [
        # m_gen 30, 21, 15.5 and m_acc 5, 8.5, 9.25
        (LengthRule(), [(30, 5), (12, 12), (10, 10)], [30, 30, 21, 20]),
        # m_gen 12, 17, 22, 24.5 and m_acc 12, 17, 10, 20: delta after the first two
        (LengthRule(), [(12, 12), (22, 22), (27, 3), (27, 30)], [30, 22, 27, 22, 24]),
        # from 0: m_gen 6, 13, 18 and m_acc 6, 13, 9
        (LengthRule(from_zero=True), [(12, 12), (20, 20), (23, 5)], [30, 20, 23, 20]),
        # rho 1 forgets; a draft that begins with EOS
        (LengthRule(rho=1.0), [(25, 0), (0, 0), (28, 2)], [30, 25, 20, 28]),
        (LengthRule(k_min=1, rho=1.0, delta=0), [(7, 7), (0, 0), (3, 1)], [30, 7, 1, 3]),
        # rho 1/4: m_gen 20, 22, 19 and m_acc 4, 10, 9
        (LengthRule(k_min=2, rho=0.25), [(20, 4), (28, 28), (10, 6)], [30, 20, 22, 19]),
        # the raw draft's length is not known: as deep as asked for, so accepting all of it is what counts
        (LengthRule(k_min=4, k_max=8, delta=3), [(None, 8), (None, 2)], [8, 8, 8]),
    ],
)
def test_lengths(rule: LengthRule, rounds: list[tuple[int | None, int]], wanted: list[int]) -> None:
    assert lengths(rule.controller(BUDGET), rounds) == wanted


def test_the_room_cuts_and_is_never_exceeded() -> None:
    controller = AdaptiveLength(BUDGET)
    assert [b and b.gamma for b in map(controller.budget, (40, 30, 29, 1, 0, -1))] == [30, 30, 29, 1, None, None]
    budget = controller.budget(5)
    assert budget is not None
    assert (budget.shape, budget.temperature) == (BUDGET.shape, BUDGET.temperature)
    # not known: as deep as asked for, the cut included
    assert lengths(LengthRule(k_min=1).controller(BUDGET), [(None, 0)], room=7) == [7, 7]


def test_rounds_without_a_draft_teach_nothing() -> None:
    controller = LengthRule().controller(BUDGET)
    assert controller.budget(0) is None
    controller.observe(record(0), EMPTY)
    controller.budget(40)
    controller.observe(record(0), EMPTY)
    assert controller.length == 30
    assert lengths(controller, [(22, 1)]) == [30, 22]  # the first observation


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (100, (20, 30, 10)),
        (30, (20, 30, 10)),
        (29, (20, 29, 10)),
        (8, (6, 8, 3)),
        (3, (2, 3, 1)),
        (2, (2, 2, 1)),
        (1, (1, 1, 1)),
    ],
)
def test_scaled_to_the_window(window: int, wanted: tuple[int, int, int]) -> None:
    rule = LengthRule.scaled(window)
    assert (rule.k_min, rule.k_max, rule.delta) == wanted
    assert AdaptiveLength(Budget(gamma=window, shape=Chain())).length == rule.k_max


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"k_min": 31}, "k_min"),
        ({"k_min": 0}, "k_min"),
        ({"k_max": 2.5}, "k_max"),
        ({"delta": -1}, "delta"),
        ({"rho": 0.0}, "rho"),
        ({"rho": 1.5}, "rho"),
        ({"rho": float("nan")}, "rho"),
        ({"from_zero": 1}, "from_zero"),
    ],
)
def test_numbers_out_of_range_are_refused(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: expected"):
        LengthRule(**values)


def test_scaling_to_no_window_is_refused() -> None:
    with pytest.raises(InputError, match=r"^window: expected"):
        LengthRule.scaled(0)


def test_controllers_by_name() -> None:
    assert isinstance(get("fixed")(BUDGET), FixedBudget)
    assert isinstance(get("adl")(BUDGET), AdaptiveLength)
    with pytest.raises(InputError, match=r"^controller: expected one of fixed, adl"):
        get("none")


@pytest.mark.parametrize("shape", [Chain(), Samples(2), Siblings((2, 1)), BestFirst(5), CausalPaths(weight=1, keep=2)])
def test_every_shape_can_be_adapted(shape: Shape) -> None:
    """Greedy text is that of plain decoding; raw drafts with an EOS shorten the next ones."""
    target = TableTarget.random(5, seed=2)
    source = TableMarginals.random(5, 6, seed=7, scale=2.0)
    drafter = MarginalDrafter(source, eos_ids=(3,))
    stop = StopOptions(max_new_tokens=40)
    texts: list[list[int]] = []
    for drafts in (drafter, None):
        loop = DecodeLoop(
            target, drafts, [Request(prompt=torch.tensor([1, 2]), stop=stop)],
            budget=Budget(gamma=6, shape=shape), controller=LengthRule(k_min=1, k_max=6, delta=2).controller,
        )  # fmt: skip
        for _ in loop.run():
            pass
        texts.append(loop.rows[0].new_tokens)
        if drafts is not None:
            proposed = {r.proposed for r in loop.rows[0].rounds}
            assert len(proposed) > 1 or isinstance(shape, Siblings)
    assert texts[0] == texts[1]
