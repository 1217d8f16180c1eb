"""Whole-row divergences against loops, in value and gradient, with part vocabularies and zeros, chunked or not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.base import IGNORED, Windows
from specdiff.objectives.distill_spec import DistillSpec, frozen_head_rows
from specdiff.objectives.divergences import DIVERGENCES, divergence_reference

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
EXACT = {"atol": 1e-10, "rtol": 1e-10}
NAMES = list(DIVERGENCES)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """[1..3, 2..5] log p, zeros and missing mass included, and positive log q."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    size = rows * (width + 1)
    p = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=size, max_size=size))).double()
    p = p.view(rows, width + 1) + torch.tensor([1e-3] + [0.0] * width)
    q = torch.tensor(draw(st.lists(st.floats(-6, 6), min_size=rows * width, max_size=rows * width))).double()
    p = p / p.sum(-1, keepdim=True)
    return (p[:, :-1] if draw(st.booleans()) else p[:, :-1] / p[:, :-1].sum(-1, keepdim=True)).log(), q.view(
        rows, width
    )


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(pairs())
def test_value_and_gradient_equal_the_reference(name: str, pair: tuple[Tensor, Tensor]) -> None:
    log_p, logits = pair
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    values = DIVERGENCES[name](log_p, torch.log_softmax(one, -1))
    wanted = divergence_reference(name, log_p, torch.log_softmax(two, -1))
    torch.testing.assert_close(values, wanted, **EXACT)
    values.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(one.grad, two.grad, **EXACT)


@SETTINGS
@given(pairs())
def test_bounds_and_pinsker(pair: tuple[Tensor, Tensor]) -> None:
    log_p, log_q = pair[0], torch.log_softmax(pair[1], -1)
    tv, jsd = DIVERGENCES["tv"](log_p, log_q), DIVERGENCES["jsd"](log_p, log_q)
    assert ((tv >= -1e-12) & (tv <= 1 + 1e-12)).all()
    assert ((jsd >= -1e-12) & (jsd <= math.log(2) + 1e-12)).all()
    whole = (log_p.exp().sum(-1) - 1).abs() < 1e-9
    assert (DIVERGENCES["forward_kl"](log_p, log_q)[whole] >= 2 * tv[whole] ** 2 - 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_rows_do_not_diverge(name: str) -> None:
    log_p = torch.log_softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double(), -1)
    torch.testing.assert_close(DIVERGENCES[name](log_p, log_p), torch.zeros(4).double(), **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_impossible_tokens_give_no_nan(name: str) -> None:
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log()
    log_q = torch.tensor([[0.5, 0.0, 0.5, 0.0]]).log().requires_grad_()
    value = DIVERGENCES[name](log_p, log_q)
    value.sum().backward()
    assert not value.isnan().any()
    assert log_q.grad.isfinite().all()


def case(draft: bool) -> tuple[Windows, Tensor]:
    """Windows with target rows, and [A, G, D] log p."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    states = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    target_head = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    vocab = torch.tensor([0, 2, 3, 7]) if draft else None
    head = target_head if vocab is None else target_head[vocab]
    labels = torch.randint(0, head.shape[0], (3, 4), generator=generator)
    labels[0, 1] = labels[2, 2:] = IGNORED
    reached = torch.ones(3, 4, dtype=torch.bool)
    reached[2, 2:] = False
    rows = frozen_head_rows(states, target_head, vocab, temperature=0.8)
    windows = Windows(hidden=hidden, head_weight=head, labels=labels, target=rows, reached=reached)
    log_p = torch.log_softmax(states @ target_head.T / 0.8, -1)
    return windows, log_p if vocab is None else log_p[..., vocab]


@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_mean_over_reached_rows(name: str, draft: bool, chunk: int) -> None:
    windows, log_p = case(draft)
    one, two = windows.hidden.clone().requires_grad_(), windows.hidden.clone().requires_grad_()
    windows = Windows(
        hidden=one,
        head_weight=windows.head_weight,
        labels=windows.labels,
        target=windows.target,
        reached=windows.reached,
    )
    result = DistillSpec(divergence=name).loss(windows, chunk=chunk)
    log_q = torch.log_softmax(two @ windows.head_weight.T, -1)
    wanted = divergence_reference(name, log_p[windows.reached], log_q[windows.reached]).mean()
    torch.testing.assert_close(result.loss, wanted, **EXACT)
    result.loss.backward()
    wanted.backward()
    torch.testing.assert_close(one.grad, two.grad, **EXACT)
    picked = torch.where(windows.known, log_q.gather(2, windows.labels.clamp_min(0)[..., None])[..., 0], 0.0)
    torch.testing.assert_close(result.log_q, picked.detach(), **EXACT)
    assert torch.equal(result.scored, windows.known)
    assert torch.equal(result.correct, windows.known & (log_q.argmax(-1) == windows.labels))


def test_without_reached_the_known_rows_count() -> None:
    windows, log_p = case(draft=True)
    bare = Windows(hidden=windows.hidden, head_weight=windows.head_weight, labels=windows.labels, target=windows.target)
    log_q = torch.log_softmax(windows.hidden @ windows.head_weight.T, -1)
    wanted = divergence_reference("tv", log_p[windows.known], log_q[windows.known]).mean()
    torch.testing.assert_close(DistillSpec().loss(bare).loss, wanted, **EXACT)


def test_never_more_than_a_chunk_of_target_rows() -> None:
    windows, _ = case(draft=False)
    sizes: list[int] = []

    def rows(numbers: Tensor) -> Tensor:
        sizes.append(numbers.numel())
        return windows.target(numbers)

    DistillSpec().loss(
        Windows(hidden=windows.hidden, head_weight=windows.head_weight, labels=windows.labels, target=rows), chunk=4
    )
    assert max(sizes) <= 4
    assert sum(sizes) == int(windows.known.sum())


def test_wrong_targets_are_refused() -> None:
    windows, _ = case(draft=False)
    parts = {"hidden": windows.hidden, "head_weight": windows.head_weight, "labels": windows.labels}
    with pytest.raises(InputError, match="target: expected rows of shape"):
        DistillSpec().loss(Windows(**parts, target=lambda numbers: torch.zeros(numbers.numel(), 2)))
    with pytest.raises(InputError, match="target: expected the target's rows"):
        DistillSpec().loss(Windows(**parts))
    with pytest.raises(InputError, match="temperature"):
        frozen_head_rows(windows.hidden, windows.head_weight, temperature=0.0)
