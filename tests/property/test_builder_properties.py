"""Draft builders and draws against slow, obvious references."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.randomness import Cdf, Uniforms, inverse_cdf
from specdiff.trees.best_first import best_first

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e3)), min_size=1, max_size=12).filter(any)


@st.composite
def marginal_rows(draw: st.DrawFn) -> Tensor:
    """[1..3, 1..6] probabilities, zeros and ties included."""
    depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    values = st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.5, 1.0, 3.0])
    rows = draw(st.lists(st.lists(values, min_size=width, max_size=width).filter(any), min_size=depth, max_size=depth))
    weights = torch.tensor(rows, dtype=torch.float64)
    return weights / weights.sum(dim=-1, keepdim=True)


@SETTINGS
@given(marginal_rows(), st.integers(1, 40))
def test_best_first_equals_brute_force(rows: Tensor, nodes: int) -> None:
    """The products of the chosen nodes are the largest of all; the nodes are distinct and form a tree."""
    draft = best_first(rows.log(), nodes)
    depth, width = rows.shape
    everything = sorted(
        (
            math.prod(float(rows[j, x]) for j, x in enumerate(text))
            for size in range(1, depth + 1)
            for text in itertools.product(range(width), repeat=size)
        ),
        reverse=True,
    )
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tree.tokens.tolist(), draft.tree.parents, strict=True):
        texts.append((*texts[parent + 1], token))
    assert len(set(texts)) == len(texts)
    chosen = [math.prod(float(rows[j, x]) for j, x in enumerate(text)) for text in texts[1:]]
    wanted = [product for product in everything if product > 0][:nodes]
    assert chosen == pytest.approx(wanted, rel=1e-9)


@SETTINGS
@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_a_prepared_row_draws_like_an_unprepared_one(weights: list[float], uniform: float) -> None:
    """Cdf and inverse_cdf are the same function of the uniform; neither returns a token without weight."""
    row = torch.tensor(weights, dtype=torch.float64)
    index = Cdf(row).index(uniform)
    assert index == inverse_cdf(row, uniform)
    assert weights[index] > 0


@SETTINGS
@given(WEIGHTS, st.floats(0, 1, exclude_max=True), st.data())
def test_taking_tokens_out_equals_zeroing_them(weights: list[float], uniform: float, data: st.DataObject) -> None:
    """One cumulative sum serves draws without replacement: same law as the masked row, up to its rounding."""
    taken = data.draw(st.lists(st.integers(0, len(weights) - 1), unique=True))
    row = torch.tensor(weights, dtype=torch.float64)
    masked = row.clone()
    masked[taken] = 0
    if float(masked.sum()) == 0:
        return
    index = Cdf(row).index(uniform, taken)
    assert index not in taken
    assert weights[index] > 0
    # the index's interval of the masked cumulative sum contains the threshold, up to rounding
    ends = torch.cumsum(masked, 0) / masked.sum()
    start = float(ends[index - 1]) if index else 0.0
    assert start - 1e-8 <= uniform <= float(ends[index]) + 1e-8


def test_draws_without_replacement_at_the_breakpoints() -> None:
    """Uniforms exactly at the ends of intervals."""
    cdf = Cdf(torch.tensor([1.0, 2.0, 0.0, 1.0]))
    assert [cdf.index(u) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 1, 3]
    assert [cdf.index(u, [1]) for u in (0.0, 0.49, 0.5, 0.99)] == [0, 0, 3, 3]
    assert [cdf.index(u, [3, 0]) for u in (0.0, 0.99)] == [1, 1]
    random = Uniforms([0.0, 0.0, 0.0])
    drawn: list[int] = []
    for _ in range(3):
        drawn.append(random.draw(cdf, without=drawn))
    assert drawn == [0, 1, 3]


def test_a_tiny_rest_is_recomputed() -> None:
    """Almost all mass is taken out: subtraction would cancel."""
    row = torch.tensor([1.0, 1e-17, 3e-17], dtype=torch.float64)
    assert [Cdf(row).index(u, [0]) for u in (0.0, 0.2, 0.3, 0.9)] == [1, 1, 2, 2]
