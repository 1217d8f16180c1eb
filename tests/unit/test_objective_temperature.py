"""Temperature fitting: depth as decoding would have it, likelihood by its maximum, sums that add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.base import IGNORED
from specdiff.objectives.temperature import GRID, fit_temperature, score_temperatures
from specdiff.trees.best_first import best_first
from specdiff.trees.paths import descend


def batch(count: int = 80, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits that are `sharpness` times those the labels were drawn with."""
    generator = torch.Generator().manual_seed(4)
    logits = 2.0 * torch.randn(count, 4, 10, generator=generator)
    labels = torch.multinomial(torch.softmax(logits, -1).flatten(0, 1), 1, generator=generator).view(count, 4)
    labels[::7, 2] = IGNORED
    labels[3] = IGNORED
    return sharpness * logits, labels


@pytest.mark.parametrize("nodes", [1, 6, 24])
def test_depth_is_that_of_the_drafted_tree(nodes: int) -> None:
    logits, labels = batch(30)
    scores = score_temperatures(logits, labels, nodes=nodes, temperatures=[0.6, 1.0, 2.0])
    for temperature, depth in zip(scores.temperatures, scores.depth.tolist(), strict=True):
        wanted = 0
        for rows, path in zip(torch.log_softmax(logits.double() / temperature, -1), labels.tolist(), strict=True):
            tree = best_first(rows, nodes).tree
            wanted += len(descend(tree.tokens.tolist(), tree.parents, path))
        assert depth == wanted
    assert scores.num_windows == 29
    assert scores.num_labels == int((labels != IGNORED).sum())


def test_likelihood_undoes_a_wrong_scale() -> None:
    for sharpness in (0.7, 1.0, 2.0):
        fitted = fit_temperature(*batch(1500, sharpness), criterion="likelihood")
        assert fitted == pytest.approx(sharpness, rel=0.12)


def test_likelihood_is_the_sum_of_log_q() -> None:
    logits, labels = batch(9)
    scores = score_temperatures(logits, labels, temperatures=[1.5])
    log_q = torch.log_softmax(logits.double() / 1.5, -1).gather(2, labels.clamp_min(0)[..., None])[..., 0]
    assert float(scores.log_likelihood) == pytest.approx(float(log_q[labels != IGNORED].sum()), rel=1e-5)


def test_sums_add_up() -> None:
    logits, labels = batch(40)
    whole = score_temperatures(logits, labels, nodes=8)
    parts = score_temperatures(logits[:11], labels[:11], nodes=8) + score_temperatures(
        logits[11:], labels[11:], nodes=8
    )
    assert torch.equal(whole.depth, parts.depth)
    torch.testing.assert_close(whole.log_likelihood, parts.log_likelihood)
    assert (whole.num_windows, whole.num_labels) == (parts.num_windows, parts.num_labels)
    assert whole.best() == fit_temperature(logits, labels, nodes=8)


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    logits, labels = batch(20)
    scores, moved = score_temperatures(logits, labels), score_temperatures(torch.log_softmax(logits, -1), labels)
    assert torch.equal(scores.depth, moved.depth)
    torch.testing.assert_close(scores.log_likelihood, moved.log_likelihood, rtol=1e-5, atol=1e-4)


def test_of_equal_temperatures_the_one_nearest_to_one() -> None:
    logits, labels = torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.int64)
    assert fit_temperature(logits, labels, nodes=3, temperatures=[0.5, 0.9, 1.25, 4.0]) == 0.9
    assert 1.0 in GRID


def test_wrong_arguments_are_refused() -> None:
    logits, labels = batch(5)
    with pytest.raises(InputError, match="temperatures"):
        score_temperatures(logits, labels, temperatures=[1.0, 0.0])
    with pytest.raises(InputError, match="temperatures: expected at least one"):
        score_temperatures(logits, labels, temperatures=[])
    with pytest.raises(InputError, match="nodes"):
        score_temperatures(logits, labels, nodes=0)
    with pytest.raises(InputError, match="logits and labels"):
        score_temperatures(logits, labels[:-1])
    with pytest.raises(InputError, match="criterion"):
        fit_temperature(logits, labels, criterion="speed")
    with pytest.raises(InputError, match="known label"):
        fit_temperature(logits, torch.full_like(labels, IGNORED))
    with pytest.raises(InputError, match="other"):
        score_temperatures(logits, labels) + score_temperatures(logits, labels, nodes=3)
