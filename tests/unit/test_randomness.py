"""Uniforms become decisions in one place, with the resolution of float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from specdiff.randomness import Cdf, RandomStream, Uniforms, inverse_cdf


def test_inverse_cdf_never_returns_a_token_of_weight_zero():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert inverse_cdf(weights, 0.0) == 1
    assert inverse_cdf(weights, 0.25) == 3
    assert inverse_cdf(weights, 1.0 - 2**-53) == 3
    assert inverse_cdf(weights, 1.0) == 3  # rounded up to the sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cdf_agrees_with_inverse_cdf_with_indices_taken_out(dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        weights = torch.rand(7, generator=generator, dtype=torch.float64).to(dtype)
        taken = torch.randperm(7, generator=generator)[:3].tolist()
        uniform = float(torch.rand(1, generator=generator, dtype=torch.float64))
        masked = weights.clone()
        masked[taken] = 0
        assert Cdf(weights).index(uniform, taken) == inverse_cdf(masked, uniform)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_made_together_draw_as_rows_made_alone(dtype):
    rows = torch.rand(4, 9, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rows[1, :3] = 0
    for row, together in zip(rows, Cdf.of_rows(rows), strict=True):
        for uniform in (0.0, 0.3, 0.7, 1 - 2**-53, 1.0):
            assert together.index(uniform) == Cdf(row).index(uniform) == inverse_cdf(row, uniform)
            assert together.index(uniform, [4, 2]) == Cdf(row).index(uniform, [4, 2])


def test_a_stream_is_freed_with_its_last_reference():
    """Not by the collector of cycles, whose passes walk all that torch and transformers hold."""
    stream = RandomStream(0, "draft")
    stream.coin(0.5)
    gone = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert gone() is None
    finally:
        gc.enable()


def test_each_call_consumes_one_uniform_in_order():
    random = Uniforms([0.1, 0.9, 0.5])
    assert random.coin(0.2)
    assert random.draw(torch.tensor([0.5, 0.5])) == 1
    assert not random.coin(0.5)
    with pytest.raises(StopIteration):
        random.coin(1.0)


@pytest.mark.parametrize("probability", [0.0, 0.001, 0.1, 0.5, 0.909, 0.999, 1.0])
def test_a_coin_falls_true_for_exactly_the_uniforms_below_its_probability(probability):
    grid = [k / 1000 for k in range(1000)]
    random = Uniforms(grid)
    assert sum(random.coin(probability) for _ in grid) == round(1000 * probability)


def test_streams_have_the_resolution_of_float64():
    uniforms = RandomStream(0, "verify").many(4096)
    assert len(set(uniforms.tolist())) == 4096, "coarse uniforms repeat"
    on_a_coarse_grid = (uniforms * 2**24) == (uniforms * 2**24).round()
    assert int(on_a_coarse_grid.sum()) < 8


def test_streams_depend_on_seed_purpose_and_request_only():
    def first(*key) -> list[float]:
        return RandomStream(*key).many(8).tolist()

    assert first(1, "draft", 0) == first(1, "draft", 0)
    assert len({tuple(first(s, p, r)) for s in (1, 2) for p in ("draft", "verify") for r in (0, 1)}) == 8
