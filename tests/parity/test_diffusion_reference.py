"""Logits of every family equal those of an independent forward pass on the same published weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdiff.models.diffusion import DiffusionLM
from support.reference_diffusion import Reference
from support.tiny_diffusion import FAMILIES, MASK, SHIFTED, VOCAB, architecture, checkpoint, weights


def sequences() -> list[torch.Tensor]:
    """Ragged sequences with masks inside and at the end."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (9, 4, 13):
        ids = torch.randint(0, VOCAB - 4, (length,), generator=generator)
        ids[length // 2], ids[-2:] = MASK, MASK
        made.append(ids)
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "norm_dtype", "tolerance"),
    # in float64 transformers keeps the norms and the rotary angles in float32, so does the reference; pure float64 next
    [(torch.float64, torch.float32, 1e-10), (torch.float32, torch.float64, 1e-5)],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_equal_the_reference(
    tmp_path: Path,
    family: str,
    tied: bool,
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
    tolerance: float,
    attention: str,
) -> None:
    folder = checkpoint(tmp_path, family, tied=tied, dtype=dtype)
    model = DiffusionLM.from_pretrained(
        folder, family="diffullama" if family == "diffullama" else None, attn_implementation=attention
    )
    assert model.config.shift == SHIFTED[family]
    reference = Reference(architecture(family), weights(family, tied=tied), norm_dtype)
    shift = int(model.config.shift)
    batch = sequences()
    with torch.inference_mode():
        rows = model.rows(batch, [(1, s.numel()) for s in batch])
    for sequence, got in zip(batch, rows, strict=True):
        own = reference.logits(sequence)
        expected = own[1 - shift : sequence.numel() - shift]  # row i of the result predicts token 1 + i
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max()
        if attention == "eager" and dtype is torch.float64:  # eager attention takes its softmax in float32
            assert error < 1e-5
        else:
            assert error < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_causal(tmp_path: Path, family: str) -> None:
    """The first row changes with a later token exactly where the published attention lets it."""
    folder = checkpoint(tmp_path, family, dtype=torch.float64)
    model = DiffusionLM.from_pretrained(folder, family="diffullama" if family == "diffullama" else None)
    shift = int(model.config.shift)
    ids = torch.arange(3, 11)
    changes = []
    with torch.inference_mode():
        first = model.rows([ids], [(shift, shift + 1)])[0]
        for position in range(1, 8):
            changed = ids.clone()
            changed[position] = 20
            changes.append(bool((model.rows([changed], [(shift, shift + 1)])[0] - first).abs().max() > 1e-12))
    assert changes == ([True] * 3 + [False] * 4 if family == "sdar" else [True] * 7)
