"""Random masking: what is drawn, from what, and with which weights."""

from __future__ import annotations

import pytest
import torch

from specdiff.errors import InputError
from specdiff.objectives.masking import Masking, draw_masking


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_generator_is_the_only_source() -> None:
    one, two = draw_masking(5, 4, seeded()), draw_masking(5, 4, seeded())
    assert torch.equal(one.masked, two.masked)
    assert torch.equal(one.rate, two.rate)
    assert not torch.equal(one.rate, draw_masking(5, 4, seeded(1)).rate)


def test_rates_are_in_range_and_stratified() -> None:
    rate = draw_masking(1000, 1, seeded(), lowest=0.2).rate
    assert 0.2 <= float(rate.min()) < 0.21
    assert 0.99 < float(rate.max()) <= 1.0
    assert rate.sort().values.diff().max() < 0.8 / 1000 + 1e-5


def test_each_token_is_hidden_with_its_rate_and_weighs_one_on_average() -> None:
    masking = draw_masking(4000, 16, seeded(), lowest=0.1)
    shares = masking.masked.float().mean(1)
    error = shares - masking.rate
    assert float(error.mean().abs()) < 0.005
    assert float((error.square() / (masking.rate * (1.0 - masking.rate) / 16 + 1e-6)).mean()) == pytest.approx(
        1.0, abs=0.1
    )
    assert float(masking.weights().mean()) == pytest.approx(1.0, abs=0.02)
    assert (masking.weights()[~masking.masked] == 0).all()


def test_at_rate_one_all_is_hidden() -> None:
    masking = draw_masking(7, 5, seeded(), lowest=1.0)
    assert masking.masked.all()
    assert (masking.weights() == 1).all()


def test_no_windows() -> None:
    assert draw_masking(0, 3, seeded()).masked.shape == (0, 3)


@pytest.mark.parametrize(("windows", "window", "lowest"), [(-1, 3, 0.1), (2, 0, 0.1), (2, 3, 0.0), (2, 3, 1.1)])
def test_impossible_draws_are_refused(windows: int, window: int, lowest: float) -> None:
    with pytest.raises(InputError, match="expected"):
        draw_masking(windows, window, seeded(), lowest=lowest)


def test_impossible_patterns_are_refused() -> None:
    with pytest.raises(InputError, match="masked and rate"):
        Masking(masked=torch.ones(2, 3, dtype=torch.bool), rate=torch.ones(3))
    with pytest.raises(InputError, match="rate"):
        Masking(masked=torch.ones(2, 3, dtype=torch.bool), rate=torch.tensor([0.5, 0.0]))
