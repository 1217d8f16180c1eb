"""Path objectives as functions of log q: against slow float64 references, in value and gradient, and by their laws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.objectives.calibrated_streak import calibrated_streak, calibrated_streak_reference
from specdiff.objectives.d_pace import d_pace, d_pace_reference
from specdiff.objectives.sampled_streak import sampled_streak, sampled_streak_reference
from specdiff.objectives.streak import streak, streak_reference
from specdiff.objectives.streak_stop_gradient import streak_stop_gradient, streak_stop_gradient_reference
from specdiff.objectives.tree_presence import tree_presence, tree_presence_reference

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
EXACT = {"atol": 1e-10, "rtol": 1e-10}

PathLoss = Callable[[Tensor, Tensor], Tensor]


def threshold(log_q: Tensor) -> Tensor:
    return torch.linspace(-6.0, -0.5, log_q.shape[0], dtype=torch.float64)


CASES: dict[str, tuple[PathLoss, PathLoss]] = {
    "streak": (streak, streak_reference),
    "streak_stop_gradient": (streak_stop_gradient, streak_stop_gradient_reference),
    "sampled_streak_1": (
        lambda q, k: sampled_streak(q, k, drafts=1),
        lambda q, k: sampled_streak_reference(q, k, drafts=1),
    ),
    "sampled_streak_8": (sampled_streak, sampled_streak_reference),
    "calibrated_streak_0": (
        lambda q, k: calibrated_streak(q, k, weight=0.0),
        lambda q, k: calibrated_streak_reference(q, k, weight=0.0),
    ),
    "calibrated_streak": (calibrated_streak, calibrated_streak_reference),
}
for a in (0.0, 0.5, 1.0):
    for n in (False, True):
        CASES[f"d_pace_{a}_{n}"] = (
            lambda q, k, a=a, n=n: d_pace(q, k, smoothing=a, normalise=n),
            lambda q, k, a=a, n=n: d_pace_reference(q, k, smoothing=a, normalise=n),
        )
for form in ("sigmoid", "softplus"):
    CASES[f"tree_presence_{form}"] = (
        lambda q, k, form=form: tree_presence(q, k, threshold(q), width=0.7, form=form),
        lambda q, k, form=form: tree_presence_reference(q, k, threshold(q), width=0.7, form=form),
    )
NAMES = list(CASES)


def gradient(loss: PathLoss, log_q: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """[A] values and the [A, G] gradient of their sum."""
    leaf = log_q.clone().requires_grad_()
    values = loss(leaf, known)
    (grad,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True) if values.requires_grad else (None,)
    return values.detach(), torch.zeros_like(log_q) if grad is None else grad


@st.composite
def paths(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """[1..4, 1..6] log q of probabilities from 1e-6 to 1, and which labels are known."""
    windows, window = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = windows * window
    probs = draw(st.lists(st.floats(1e-6, 1.0), min_size=size, max_size=size))
    flags = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=size, max_size=size))
    log_q = torch.tensor(probs, dtype=torch.float64).log().view(windows, window)
    return log_q, torch.tensor(flags).view(windows, window)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(paths())
def test_value_and_gradient_equal_the_reference(name: str, path: tuple[Tensor, Tensor]) -> None:
    loss, reference = CASES[name]
    values, grad = gradient(loss, *path)
    wanted, wanted_grad = gradient(reference, *path)
    torch.testing.assert_close(values, wanted, **EXACT)
    torch.testing.assert_close(grad, wanted_grad, **EXACT)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("calibrated_streak")])
@SETTINGS
@given(paths(), st.integers(0, 5))
def test_an_unknown_label_ends_the_streak(name: str, path: tuple[Tensor, Tensor], place: int) -> None:
    """Cutting the window there gives the same loss, and nothing behind has a gradient, whatever stands there."""
    log_q, known = path
    place = min(place, log_q.shape[1] - 1)
    known = known.clone()
    known[:, place] = False
    values, grad = gradient(CASES[name][0], log_q, known)
    assert (grad[:, place:] == 0).all()
    noise = log_q.clone()
    noise[:, place] = math.nan
    noise[:, place + 1 :] = -3.0
    other, other_grad = gradient(CASES[name][0], noise, known)
    assert torch.equal(values, other)
    assert torch.equal(grad, other_grad)
    if place:
        short, short_grad = gradient(CASES[name][0], log_q[:, :place], known[:, :place])
        torch.testing.assert_close(values, short, **EXACT)
        torch.testing.assert_close(grad[:, :place], short_grad, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_known_is_no_loss_and_no_gradient(name: str) -> None:
    values, grad = gradient(CASES[name][0], torch.full((3, 4), -1.0).double(), torch.zeros(3, 4, dtype=torch.bool))
    assert (values == 0).all()
    assert (grad == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", range(4))
def test_an_impossible_token_gives_no_nan(name: str, place: int) -> None:
    log_q = torch.full((1, 4), -0.5, dtype=torch.float64)
    log_q[0, place] = -math.inf
    values, grad = gradient(CASES[name][0], log_q, torch.ones(1, 4, dtype=torch.bool))
    assert not values.isnan().any()
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_certain_tokens_give_no_nan(name: str) -> None:
    values, grad = gradient(CASES[name][0], torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool))
    assert values.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["streak", "sampled_streak_8", "calibrated_streak", "tree_presence_softplus"])
def test_finite_differences(name: str) -> None:
    log_q = torch.tensor([[-0.3, -1.0, -0.1], [-2.0, -0.2, -0.7]], dtype=torch.float64, requires_grad=True)
    known = torch.tensor([[True, True, True], [True, True, False]])
    assert torch.autograd.gradcheck(lambda q: CASES[name][0](q, known), (log_q,))


@SETTINGS
@given(paths())
def test_unsmoothed_d_pace_has_the_streak_gradient(path: tuple[Tensor, Tensor]) -> None:
    """At a = 0 and without normalisation; with it, the gradient differs by a factor a window."""
    _, wanted = gradient(streak, *path)
    _, grad = gradient(lambda q, k: d_pace(q, k, smoothing=0.0), *path)
    torch.testing.assert_close(grad, wanted, **EXACT)
    _, scaled = gradient(lambda q, k: d_pace(q, k, smoothing=0.0, normalise=True), *path)
    torch.testing.assert_close(scaled * wanted.sum(1, keepdim=True), wanted * scaled.sum(1, keepdim=True), **EXACT)


def test_fully_smoothed_d_pace_is_cross_entropy_with_falling_weights() -> None:
    log_q = torch.tensor([[-1.0, -2.0, -4.0]], dtype=torch.float64)
    known = torch.ones(1, 3, dtype=torch.bool)
    assert float(d_pace(log_q, known, smoothing=1.0)) == pytest.approx(3 * 1.0 + 2 * 2.0 + 1 * 4.0)
    _, grad = gradient(lambda q, k: d_pace(q, k, smoothing=1.0, normalise=True), log_q, known)
    assert grad[0].tolist() == pytest.approx([-3 / 6, -2 / 6, -1 / 6])


@SETTINGS
@given(paths())
def test_detached_weights_carry_no_gradient(path: tuple[Tensor, Tensor]) -> None:
    """The stop-gradient losses are linear in log q as far as autograd can see: the gradient is minus the weights."""
    log_q, known = path
    for name in ("streak_stop_gradient", "d_pace_0.5_False"):
        values, grad = gradient(CASES[name][0], log_q, known)
        torch.testing.assert_close((grad * log_q).sum(1), values, **EXACT)


def test_the_first_row_of_the_stop_gradient_form_weighs_one() -> None:
    log_q = torch.tensor([[-9.0, -0.1]], dtype=torch.float64)
    _, grad = gradient(streak_stop_gradient, log_q, torch.ones(1, 2, dtype=torch.bool))
    assert grad[0].tolist() == pytest.approx([-1.0, -math.exp(-9.0)])


def test_streak_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64)
    known = torch.ones(1, 3, dtype=torch.bool)
    assert float(streak(probs.log(), known)) == pytest.approx(-(0.5 + 0.2 + 0.02))
    _, grad = gradient(streak, probs.log(), known)
    assert grad[0].tolist() == pytest.approx([-0.72, -0.22, -0.02])


@SETTINGS
@given(paths())
def test_one_draft_is_streak_and_more_drafts_run_deeper(path: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(sampled_streak(*path, drafts=1), streak(*path), **EXACT)
    depths = torch.stack([-sampled_streak(*path, drafts=k) for k in (1, 2, 4, 32)])
    assert (depths.diff(dim=0) >= -1e-12).all()
    assert (depths <= path[1].cumprod(1).sum(1) + 1e-12).all()


def test_the_k_draft_streak_is_the_depth_in_a_trie_of_draws() -> None:
    """By enumeration: K draws from one law of three tokens; the first is the target's."""
    q = [0.2, 0.5, 0.3]
    hit = sum(q[a] * q[b] for a in range(3) for b in range(3) if 0 in (a, b))
    log_q = torch.tensor([[q[0]]], dtype=torch.float64).log()
    assert -float(sampled_streak(log_q, torch.ones(1, 1, dtype=torch.bool), drafts=2)) == pytest.approx(hit)


def optimum(loss: PathLoss, p: Tensor) -> Tensor:
    """[D] the q that minimises a one-row loss when labels come from p."""
    logits = p.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    known = torch.ones(p.numel(), 1, dtype=torch.bool)
    for _ in range(400):
        optimizer.zero_grad()
        (p * loss(torch.log_softmax(logits, -1)[:, None], known)).sum().backward()
        optimizer.step()
    return torch.softmax(logits.detach(), -1)


def test_what_the_best_q_of_one_row_is() -> None:
    """The claims of the docstrings: streak is greedy, calibration and drafts hedge."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert float(optimum(streak, p)[0]) > 0.99
    q = optimum(lambda log_q, known: calibrated_streak(log_q, known, weight=0.5), p)
    levels = p * (1.0 + 0.5 / q)
    torch.testing.assert_close(levels, levels.mean().expand(3), atol=1e-3, rtol=1e-3)
    assert q[0] > q[1] > q[2] > 0
    assert q[0] > p[0]
    q = optimum(lambda log_q, known: sampled_streak(log_q, known, drafts=8), p)
    levels = p * (1.0 - q) ** 7
    torch.testing.assert_close(levels, levels.mean().expand(3), atol=1e-3, rtol=1e-3)
    assert q[2] > 0.2
