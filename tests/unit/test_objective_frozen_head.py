"""The chunked head: log q of labels and top tokens, and the one sweep, against plain autograd with all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdiff.objectives.base import IGNORED
from specdiff.objectives.frozen_head import label_log_q, one_sweep

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def rows(count: int = 11, hidden: int = 5, vocab: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(count, hidden, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (count,), generator=generator)
    labels[::5] = IGNORED
    return states, head, labels


def mix(log_q: Tensor, top: Tensor) -> Tensor:
    """A loss that couples rows, so that no row's gradient is known before all are scored."""
    return log_q.logsumexp(0) + (top.exp() * torch.arange(1.0, top.shape[1] + 1)).sum().square()


@pytest.mark.parametrize("num_top", [0, 1, 3, 8])
@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_scores_and_gradients_equal_the_plain_ones(chunk: int, num_top: int) -> None:
    states, head, labels = rows()
    one, two = states.clone().requires_grad_(), states.clone().requires_grad_()
    found = label_log_q(one, head, labels, num_top=num_top, chunk=chunk)
    plain = torch.log_softmax(two @ head.T, -1)
    known = labels != IGNORED
    log_q = torch.where(known, plain.gather(1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    top = plain.topk(num_top, -1).values
    torch.testing.assert_close(found.log_q, log_q, **EXACT)
    torch.testing.assert_close(found.top, top, **EXACT)
    assert torch.equal(found.correct, known & (plain.argmax(-1) == labels))
    mix(found.log_q, found.top).backward()
    mix(log_q, top).backward()
    torch.testing.assert_close(one.grad, two.grad, **EXACT)


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    states, head, labels = rows()
    states.requires_grad_()
    loss = label_log_q(states, head, labels, chunk=50).log_q.sum()
    (first,) = torch.autograd.grad(loss, states, retain_graph=True)
    (second,) = torch.autograd.grad(loss, states)
    torch.testing.assert_close(first, second, **EXACT)


def test_no_rows_are_no_scores() -> None:
    states, head, labels = rows()
    empty = states[:0].clone().requires_grad_()
    found = label_log_q(empty, head, labels[:0], num_top=2)
    found.log_q.sum().backward()
    assert found.log_q.shape == (0,)
    assert found.top.shape == (0, 2)
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape


def test_an_impossible_label_is_minus_infinity() -> None:
    head = torch.tensor([[0.0, 1.0], [-math.inf, 0.0], [1.0, 0.0]], dtype=torch.float64)
    found = label_log_q(torch.tensor([[1.0, 2.0]], dtype=torch.float64), head, torch.tensor([1]), num_top=3)
    assert float(found.log_q) == -math.inf
    assert found.top[0].tolist() == pytest.approx([-0.313262, -1.313262, -math.inf], abs=1e-5)


def test_large_logits_stay_finite() -> None:
    states = torch.tensor([[1e4, -1e4]], requires_grad=True)
    found = label_log_q(states, torch.eye(2), torch.tensor([1]), num_top=1)
    (found.log_q.sum() + found.top.sum()).backward()
    assert float(found.log_q.detach()) == pytest.approx(-2e4)
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_low_precision_rows_are_scored_in_fp32() -> None:
    states, head, labels = rows()
    assert label_log_q(states.bfloat16(), head.bfloat16(), labels).log_q.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 3, 11, 40])
def test_one_sweep_equals_autograd(size: int) -> None:
    states, head, labels = rows()
    one, two = states.clone().requires_grad_(), states.clone().requires_grad_()
    parts: list[slice] = []

    def chunk_loss(hidden: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        parts.append(part)
        found = label_log_q(hidden, head, labels[part])
        return found.log_q.exp().sum(), found.log_q, found.correct

    loss, log_q, correct = one_sweep(one, chunk_loss, size)
    plain = label_log_q(two, head, labels)
    (2.0 * loss).backward()
    (2.0 * plain.log_q.exp().sum()).backward()
    torch.testing.assert_close(loss, plain.log_q.exp().sum(), **EXACT)
    torch.testing.assert_close(one.grad, two.grad, **EXACT)
    torch.testing.assert_close(log_q, plain.log_q.detach(), **EXACT)
    assert torch.equal(correct, plain.correct)
    assert not log_q.requires_grad
    assert len(parts) == math.ceil(11 / size)


def test_one_sweep_makes_no_gradient_where_none_is_asked_for() -> None:
    states, head, labels = rows()

    def chunk_loss(hidden: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        assert not hidden.requires_grad
        found = label_log_q(hidden, head, labels[part])
        return found.log_q.sum(), found.log_q, found.correct

    assert not one_sweep(states, chunk_loss, 4)[0].requires_grad


def test_one_sweep_takes_a_loss_that_ignores_its_rows() -> None:
    states = torch.ones(3, 2, requires_grad=True)
    loss, _, _ = one_sweep(states, lambda rows, _: (rows.new_ones(()), rows[:, 0], rows[:, 0]), 2)
    loss.backward()
    assert float(loss.detach()) == 2.0
    assert states.grad is not None
    assert (states.grad == 0).all()
