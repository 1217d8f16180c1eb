"""The masked loss: its equation, its chunked form against the plain one, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from specdiff.errors import SpecdiffError
from specdiff.objectives.masked import (
    IGNORED,
    masked_cross_entropy,
    masked_cross_entropy_reference,
    position_weights,
)


def rows(count: int = 13, hidden: int = 6, vocab: int = 9, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, hidden, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (count,), generator=generator)
    labels[::4] = IGNORED
    weights = torch.rand(count, generator=generator)
    return states, head, labels, weights


def test_weights_decay_geometrically():
    assert position_weights(4, 0.5).tolist() == [1.0, 0.5, 0.25, 0.125]
    assert position_weights(3, 1.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("window", "decay"), [(0, 0.5), (4, 0.0), (4, 1.5), (4, -1.0)])
def test_impossible_weights_are_refused(window, decay):
    with pytest.raises(SpecdiffError, match="expected"):
        position_weights(window, decay)


def test_value_by_hand():
    states = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [5.0, 5.0]])
    labels = torch.tensor([0, 1, IGNORED])
    result = masked_cross_entropy(states, torch.eye(2), labels, torch.tensor([2.0, 1.0, 9.0]))
    expected = (2.0 * math.log(4 / 3) + 1.0 * math.log(2.0)) / 3.0
    assert float(result.loss) == pytest.approx(expected, rel=1e-6)
    assert result.nll.tolist() == pytest.approx([math.log(4 / 3), math.log(2.0), 0.0], rel=1e-6)
    assert result.correct.tolist() == [True, False, False]


@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
def test_chunked_loss_and_gradient_equal_the_plain_ones(chunk):
    states, head, labels, weights = rows(dtype=torch.float32)
    one, two = states.clone().requires_grad_(), states.clone().requires_grad_()
    result = masked_cross_entropy(one, head, labels, weights, chunk=chunk)
    plain = masked_cross_entropy_reference(two, head, labels, weights)
    (3.0 * result.loss).backward()
    (3.0 * plain).backward()
    torch.testing.assert_close(result.loss, plain)
    torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-5)
    assert (one.grad[labels == IGNORED] == 0).all()


def test_bf16_rows_agree_with_fp32():
    states, head, labels, weights = rows(dtype=torch.bfloat16)
    low, high = states.clone().requires_grad_(), states.float().requires_grad_()
    masked_cross_entropy(low, head, labels, weights).loss.backward()
    masked_cross_entropy(high, head.float(), labels, weights).loss.backward()
    assert low.grad.dtype == torch.bfloat16
    torch.testing.assert_close(low.grad.float(), high.grad, atol=2e-3, rtol=5e-2)


def test_large_logits_stay_finite():
    states = torch.tensor([[1e4, -1e4]], requires_grad=True)
    result = masked_cross_entropy(states, torch.eye(2), torch.tensor([1]), torch.ones(1))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(2e4)
    assert states.grad.isfinite().all()


def test_nothing_known_is_no_loss_and_no_gradient():
    states, head, _, weights = rows(dtype=torch.float32)
    states.requires_grad_()
    result = masked_cross_entropy(states, head, torch.full((13,), IGNORED), weights)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert (states.grad == 0).all()


def test_no_gradient_is_made_where_none_is_asked_for():
    states, head, labels, weights = rows(dtype=torch.float32)
    assert not masked_cross_entropy(states, head, labels, weights).loss.requires_grad


def test_wrong_arguments_are_refused():
    states, head, labels, weights = rows()
    with pytest.raises(SpecdiffError, match="hidden and head_weight"):
        masked_cross_entropy(states, head[:, :-1], labels, weights)
    with pytest.raises(SpecdiffError, match="labels and weights"):
        masked_cross_entropy(states, head, labels[:-1], weights)
    with pytest.raises(SpecdiffError, match="labels and weights"):
        masked_cross_entropy(states, head, labels, weights[:-1])
    with pytest.raises(SpecdiffError, match="head_weight: expected a frozen tensor"):
        masked_cross_entropy(states, head.requires_grad_(), labels, weights)
    with pytest.raises(SpecdiffError, match="chunk"):
        masked_cross_entropy(states, head.detach(), labels, weights, chunk=0)
