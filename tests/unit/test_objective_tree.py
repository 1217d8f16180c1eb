"""The tree's threshold against the heap that drafts and against enumeration; the presence surrogate by its claims."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.objectives.tree_presence import TreePresence, tree_presence
from specdiff.objectives.tree_threshold import tree_threshold, tree_threshold_reference
from specdiff.trees.best_first import best_first
from specdiff.trees.paths import descend

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def laws(draw: st.DrawFn) -> Tensor:
    """[1..3, 1..3, 1..5] log-probabilities, zeros and ties included."""
    windows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    values = st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.5, 1.0, 3.0])
    row = st.lists(values, min_size=width, max_size=width).filter(any)
    window = st.lists(row, min_size=depth, max_size=depth)
    weights = torch.tensor(draw(st.lists(window, min_size=windows, max_size=windows)), dtype=torch.float64)
    return (weights / weights.sum(-1, keepdim=True)).log()


def log_products(log_rows: Tensor, nodes: int) -> list[float]:
    """Log product of every node of the tree that decoding would draft."""
    tree = best_first(log_rows, nodes).tree
    sums: list[float] = []
    for token, parent, depth in zip(tree.tokens.tolist(), tree.parents, tree.depths, strict=True):
        sums.append((sums[parent] if parent >= 0 else 0.0) + float(log_rows[int(depth) - 1, token]))
    return sums


@SETTINGS
@given(laws(), st.integers(1, 40))
def test_threshold_equals_enumeration_and_the_heap(log_rows: Tensor, nodes: int) -> None:
    top = log_rows.topk(min(nodes, log_rows.shape[-1]), dim=-1).values
    found = tree_threshold(top, nodes)
    torch.testing.assert_close(found, tree_threshold_reference(log_rows, nodes), atol=1e-12, rtol=1e-12)
    for rows, level in zip(log_rows, found.tolist(), strict=True):
        sums = log_products(rows, nodes)
        assert level == (pytest.approx(min(sums), abs=1e-12) if len(sums) == nodes else -math.inf)


@pytest.mark.parametrize("nodes", [1, 2, 7, 24, 60])
def test_threshold_of_wide_windows_equals_the_heap(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    log_rows = torch.log_softmax(3.0 * torch.randn(20, 8, 100, generator=generator, dtype=torch.float64), -1)
    found = tree_threshold(log_rows.topk(min(nodes, 100), dim=-1).values, nodes)
    wanted = [min(log_products(rows, nodes)) for rows in log_rows]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_moving_threshold_has_the_reference_gradient() -> None:
    generator = torch.Generator().manual_seed(5)
    log_rows = torch.log_softmax(torch.randn(3, 3, 4, generator=generator, dtype=torch.float64), -1)
    one, two = log_rows.clone().requires_grad_(), log_rows.clone().requires_grad_()
    tree_threshold(one.topk(4, dim=-1).values, 9).sum().backward()
    tree_threshold_reference(two, 9).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, atol=1e-12, rtol=1e-12)


def depth_in_tree(log_rows: Tensor, labels: Tensor, nodes: int) -> int:
    tree = best_first(log_rows, nodes).tree
    return len(descend(tree.tokens.tolist(), tree.parents, labels.tolist()))


def windows(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    log_rows = torch.log_softmax(3.0 * torch.randn(count, 5, 12, generator=generator, dtype=torch.float64), -1)
    labels = torch.multinomial(log_rows.exp().flatten(0, 1), 1, generator=generator).view(count, 5)
    return log_rows, labels


def test_a_narrow_sigmoid_counts_the_tokens_the_tree_holds() -> None:
    log_rows, labels = windows()
    log_q = log_rows.gather(2, labels[..., None])[..., 0]
    level = tree_threshold(log_rows.topk(10).values, 10) - 1e-9  # the last node is in
    depths = -tree_presence(log_q, torch.ones_like(labels, dtype=torch.bool), level, width=1e-11)
    assert depths.tolist() == [depth_in_tree(*one, 10) for one in zip(log_rows, labels, strict=True)]
    assert 0 < float(depths.mean()) < 5


def test_softplus_bounds_the_missing_tokens() -> None:
    log_rows, labels = windows()
    log_q = log_rows.gather(2, labels[..., None])[..., 0]
    level = tree_threshold(log_rows.topk(10).values, 10)
    bound = tree_presence(log_q, torch.ones_like(labels, dtype=torch.bool), level, width=0.5, form="softplus")
    missing = 5 - torch.tensor([depth_in_tree(*one, 10) for one in zip(log_rows, labels, strict=True)])
    assert (missing <= bound / (0.5 * math.log(2.0)) + 1e-9).all()


@pytest.mark.parametrize("form", ["sigmoid", "softplus"])
def test_a_tree_that_holds_everything_asks_for_nothing(form: str) -> None:
    log_q = torch.tensor([[-1.0, -50.0]], dtype=torch.float64, requires_grad=True)
    known = torch.ones(1, 2, dtype=torch.bool)
    loss = tree_presence(log_q, known, torch.tensor([-math.inf], dtype=torch.float64), form=form)
    loss.sum().backward()
    assert float(loss.detach()) == (-2.0 if form == "sigmoid" else 0.0)
    assert (log_q.grad == 0).all()


def test_safe_prefixes_pull_no_more_and_the_softplus_keeps_at_the_hopeless() -> None:
    known = torch.ones(1, 1, dtype=torch.bool)
    pulls: dict[tuple[str, float], float] = {}
    for form in ("sigmoid", "softplus"):
        for value in (-0.01, -20.0, -40.0):
            log_q = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
            tree_presence(log_q, known, torch.tensor([-20.0], dtype=torch.float64), form=form).sum().backward()
            pulls[form, value] = -float(log_q.grad)
    assert pulls["sigmoid", -0.01] < 1e-8
    assert pulls["softplus", -0.01] < 1e-8
    assert pulls["sigmoid", -20.0] == pytest.approx(0.25)
    assert pulls["sigmoid", -40.0] < 1e-8
    assert pulls["softplus", -40.0] == pytest.approx(1.0)


def test_top_tokens_asked_for() -> None:
    assert TreePresence(nodes=7).num_top == 7
