"""One interface: objectives by name, and each one's loss over windows against all logits at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.ar_distillation import ar_distillation_reference
from specdiff.objectives.base import IGNORED, WindowLoss, Windows
from specdiff.objectives.calibrated_streak import calibrated_streak_reference
from specdiff.objectives.d_pace import d_pace_reference
from specdiff.objectives.divergences import divergence_reference
from specdiff.objectives.masked import masked_cross_entropy, masked_cross_entropy_reference, position_weights
from specdiff.objectives.masking import draw_masking
from specdiff.objectives.mdm import mdm_reference
from specdiff.objectives.registry import OBJECTIVES, make, parameters_of
from specdiff.objectives.sampled_streak import sampled_streak_reference
from specdiff.objectives.streak import streak_reference
from specdiff.objectives.streak_stop_gradient import streak_stop_gradient_reference
from specdiff.objectives.tree_presence import tree_presence_reference
from specdiff.objectives.tree_threshold import tree_threshold_reference

EXACT = {"atol": 1e-10, "rtol": 1e-10}
NAMES = {
    "streak",
    "streak_stop_gradient",
    "d_pace",
    "cross_entropy",
    "mdm",
    "ar_distillation",
    "distill_spec",
    "calibrated_streak",
    "sampled_streak",
    "tree_presence",
}

# From windows and [A, G, D] log q to the loss, the slow way.
Reference = Callable[[Windows, Tensor], Tensor]


def path(windows: Windows, log_rows: Tensor) -> Tensor:
    return log_rows.gather(2, windows.labels.clamp_min(0)[..., None])[..., 0]


def per_window(reference: Callable[..., Tensor], **parameters: Any) -> Reference:
    """The mean of a window loss over windows with a known label."""

    def loss(windows: Windows, log_rows: Tensor) -> Tensor:
        losses = reference(path(windows, log_rows), windows.known, **parameters)
        return losses.sum() / max(int(windows.known.any(1).sum()), 1)

    return loss


def presence(form: str, *, moving: bool, calibration: float) -> Reference:
    def loss(windows: Windows, log_rows: Tensor) -> Tensor:
        level = tree_threshold_reference(log_rows if moving else log_rows.detach(), 6)
        losses = tree_presence_reference(path(windows, log_rows), windows.known, level, width=0.5, form=form)
        nll = -(path(windows, log_rows) * windows.known).sum(1) / windows.labels.shape[1]
        return (losses + calibration * nll).sum() / max(int(windows.known.any(1).sum()), 1)

    return loss


def cross_entropy(windows: Windows, log_rows: Tensor) -> Tensor:
    weights = position_weights(windows.labels.shape[1], 0.5).repeat(windows.labels.shape[0]).double()
    width = log_rows.shape[2]
    return masked_cross_entropy_reference(
        log_rows.flatten(0, 1), torch.eye(width, dtype=torch.float64), windows.labels.flatten(), weights
    )


def distillation(windows: Windows, log_rows: Tensor) -> Tensor:
    numbers = torch.arange(windows.labels.numel())
    log_p = windows.target(numbers).view_as(log_rows)[windows.known]
    return divergence_reference("jsd", log_p, log_rows[windows.known]).sum() / max(int(windows.known.sum()), 1)


CASES: list[tuple[str, Mapping[str, object], Reference]] = [
    ("streak", {}, per_window(streak_reference)),
    ("streak_stop_gradient", {}, per_window(streak_stop_gradient_reference)),
    ("d_pace", {"smoothing": 0.3}, per_window(d_pace_reference, smoothing=0.3)),
    ("d_pace", {"normalise": True}, per_window(d_pace_reference, normalise=True)),
    ("cross_entropy", {"decay": 0.5}, cross_entropy),
    ("mdm", {}, lambda windows, log_rows: mdm_reference(path(windows, log_rows), windows.known, windows.masking)),
    (
        "ar_distillation",
        {},
        lambda windows, log_rows: ar_distillation_reference(path(windows, log_rows), windows.known),
    ),
    ("distill_spec", {"divergence": "jsd"}, distillation),
    ("calibrated_streak", {"weight": 2.0}, per_window(calibrated_streak_reference, weight=2.0)),
    ("sampled_streak", {"drafts": 3}, per_window(sampled_streak_reference, drafts=3)),
    ("tree_presence", {"nodes": 6, "width": 0.5}, presence("sigmoid", moving=False, calibration=0.0)),
    (
        "tree_presence",
        {"nodes": 6, "width": 0.5, "form": "softplus", "moving": True, "calibration": 0.3},
        presence("softplus", moving=True, calibration=0.3),
    ),
]
IDS = [name + "".join(f",{key}={value}" for key, value in parameters.items()) for name, parameters, _ in CASES]


def batch(name: str, window: int = 3, dtype: torch.dtype = torch.float64, known: bool = True) -> Windows:
    """Five windows; one without labels, one with a gap, one that ends early."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(5, window, 4, generator=generator, dtype=torch.float64)
    head = 2.0 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (5, window), generator=generator)
    labels[1] = IGNORED
    labels[2, 0] = IGNORED
    labels[3, window // 2 :] = IGNORED
    log_p = torch.log_softmax(torch.randn(5 * window, 4, generator=generator, dtype=torch.float64), -1)
    kind = OBJECTIVES[name]
    return Windows(
        hidden=hidden.to(dtype).requires_grad_(),
        head_weight=head.to(dtype),
        labels=labels if known else torch.full_like(labels, IGNORED),
        target=(lambda numbers: log_p[numbers]) if kind.needs_target else None,
        masking=draw_masking(5, window, generator, lowest=0.5) if kind.needs_masking else None,
    )


def gradient(result: WindowLoss, windows: Windows) -> Tensor:
    return torch.autograd.grad(result.loss, windows.hidden)[0]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("name", "parameters", "reference"), CASES, ids=IDS)
def test_value_and_gradient_equal_all_logits_at_once(
    name: str, parameters: Mapping[str, object], reference: Reference, window: int, chunk: int
) -> None:
    windows = batch(name, window)
    result = make(name, parameters).loss(windows, chunk=chunk)
    log_rows = torch.log_softmax(windows.hidden @ windows.head_weight.T, -1)
    wanted = reference(windows, log_rows)
    torch.testing.assert_close(result.loss, wanted, **EXACT)
    torch.testing.assert_close(gradient(result, windows), torch.autograd.grad(wanted, windows.hidden)[0], **EXACT)
    torch.testing.assert_close(result.log_q, torch.where(result.scored, path(windows, log_rows), 0.0).detach(), **EXACT)
    assert torch.equal(result.correct, result.scored & (log_rows.argmax(-1) == windows.labels))
    assert (result.scored <= windows.known).all()


@pytest.mark.parametrize(("name", "parameters", "reference"), CASES, ids=IDS)
def test_nothing_known_is_no_loss_and_no_gradient(
    name: str, parameters: Mapping[str, object], reference: Reference
) -> None:
    windows = batch(name, known=False)
    result = make(name, parameters).loss(windows)
    assert float(result.loss.detach()) == 0.0
    assert (gradient(result, windows) == 0).all()
    assert not result.scored.any()


@pytest.mark.parametrize(("name", "parameters", "reference"), CASES, ids=IDS)
def test_low_precision_rows(name: str, parameters: Mapping[str, object], reference: Reference) -> None:
    low, high = batch(name, dtype=torch.bfloat16), batch(name)
    objective = make(name, parameters)
    loss = objective.loss(low)
    assert loss.loss.dtype == torch.float32
    grad = gradient(loss, low)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), gradient(objective.loss(high), high), atol=0.05, rtol=0.1)


@pytest.mark.parametrize("name", ["streak", "d_pace", "ar_distillation", "mdm"])
def test_rows_that_take_no_part_never_reach_the_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = batch(name)
    from specdiff.objectives import path as module

    rows: list[int] = []
    plain = module.label_log_q

    def counted(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(hidden.shape[0])
        return plain(hidden, *arguments, **options)

    monkeypatch.setattr(module, "label_log_q", counted)
    result = make(name).loss(windows, chunk=6)
    assert sum(rows) == int(result.scored.sum())
    assert max(rows) <= 6


def test_cross_entropy_is_the_function_the_trainer_has_used() -> None:
    windows = batch("cross_entropy")
    weights = position_weights(3, 0.8).repeat(5)
    old = masked_cross_entropy(windows.hidden.flatten(0, 1), windows.head_weight, windows.labels.flatten(), weights)
    new = make("cross_entropy").loss(windows)
    torch.testing.assert_close(new.loss, old.loss, **EXACT)
    torch.testing.assert_close(-new.log_q.flatten(), old.nll, **EXACT)
    assert torch.equal(new.correct.flatten(), old.correct)


def test_every_objective_is_registered_under_its_own_name() -> None:
    assert set(OBJECTIVES) == NAMES
    assert all(make(name).name == name for name in NAMES)
    assert {name for name, _, _ in CASES} == NAMES


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        OBJECTIVES["mine"] = OBJECTIVES["streak"]  # type: ignore[index]


def test_parameters_and_defaults() -> None:
    assert parameters_of("d_pace") == {"smoothing": 0.5, "normalise": False}
    assert parameters_of("streak") == {}
    assert make("d_pace", {"smoothing": 0.25}) == make("d_pace", {"smoothing": 0.25, "normalise": False})


def test_unknown_names_and_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="objective: expected one of") as caught:
        make("kl")
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(InputError, match="'d_pace': expected one of smoothing, normalise, got 'alpha'"):
        make("d_pace", {"alpha": 0.5})
    with pytest.raises(InputError, match="'streak': expected none"):
        make("streak", {"weight": 1.0})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("d_pace", {"smoothing": 1.5}),
        ("d_pace", {"smoothing": math.nan}),
        ("d_pace", {"normalise": 1}),
        ("cross_entropy", {"decay": 0.0}),
        ("distill_spec", {"divergence": "hellinger"}),
        ("calibrated_streak", {"weight": -1.0}),
        ("sampled_streak", {"drafts": 0}),
        ("sampled_streak", {"drafts": 2.5}),
        ("tree_presence", {"nodes": 0}),
        ("tree_presence", {"width": 0.0}),
        ("tree_presence", {"form": "step"}),
        ("tree_presence", {"moving": "no"}),
        ("tree_presence", {"calibration": math.inf}),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, parameters: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(parameters)) + ": expected"):
        make(name, parameters)


def test_windows_that_do_not_fit_are_refused() -> None:
    windows = batch("streak")
    with pytest.raises(InputError, match="hidden and head_weight"):
        replace(windows, head_weight=windows.head_weight[:, :-1])
    with pytest.raises(InputError, match="head_weight: expected a frozen"):
        replace(windows, head_weight=windows.head_weight.clone().requires_grad_())
    with pytest.raises(InputError, match="labels: expected shape"):
        replace(windows, labels=windows.labels[:-1])
    with pytest.raises(InputError, match="labels: expected columns"):
        replace(windows, labels=windows.labels + 4)
    with pytest.raises(InputError, match="reached"):
        replace(windows, reached=windows.known[:, :-1])
    with pytest.raises(InputError, match="chunk"):
        make("streak").loss(windows, chunk=0)


def test_maskings_belong_to_mdm() -> None:
    windows = batch("streak")
    masking = draw_masking(5, 3, torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="masking: expected None for 'streak'"):
        make("streak").loss(replace(windows, masking=masking))
    with pytest.raises(InputError, match="masking: expected a masking"):
        make("mdm").loss(windows)
    with pytest.raises(InputError, match="masking: expected shape"):
        replace(windows, masking=draw_masking(4, 3, torch.Generator().manual_seed(0)))
