"""Training masked diffusion LMs: the states of decoding, gradients of what is trained, exports that reload."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdiff.errors import InputError
from specdiff.models.diffusion import DiffusionLM, Window, add_lora
from specdiff.train.masked import MaskedLearner
from specdiff.train.windows import AnswerRow, label_table, pack
from support.tiny_diffusion import FAMILIES, VOCAB, checkpoint, tiny

ROW = AnswerRow(id="a", tokens=tuple(range(3, 17)), prompt_length=4)
ANCHORS, WINDOW = (3, 7, 11), 4


def batch_for(learner: MaskedLearner):
    return pack([ROW], [list(ANCHORS)], window=WINDOW, labels_of=label_table(learner.draft_vocab, VOCAB))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_drafts_what_the_trained_model_drafts(tmp_path: Path, family: str, tied: bool, rank: int) -> None:
    asked = family if family == "diffullama" else None
    lm = DiffusionLM.from_pretrained(checkpoint(tmp_path / "base", family, tied=tied), family=asked, probe=False)
    if rank:
        add_lora(lm, rank=rank, alpha=8)
    learner = MaskedLearner(lm, window=WINDOW, vocab_size=VOCAB)
    before = learner.head(learner.states(batch_for(learner)))
    before.square().mean().backward()
    trained = {n: p for n, p in learner.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    assert not any("embed_tokens" in n or "lm_head" in n for n in trained)
    assert (set(trained) == {n for n in trained if "lora_" in n} | {"mask_embedding"}) == bool(rank)

    generator = torch.Generator().manual_seed(0)
    weights = {n: p.detach() + 0.05 * torch.randn(p.shape, generator=generator) for n, p in trained.items()}
    source = learner.source(weights)
    live = learner.head(learner.states(batch_for(learner))).detach()
    assert (live - before).abs().max() > 1e-2
    learner.export(tmp_path / "out", weights)
    reloaded = DiffusionLM.from_pretrained(tmp_path / "out", probe=False)
    masks = torch.full((WINDOW,), lm.config.mask_id, dtype=torch.int64)
    for model in (source.denoiser, reloaded):  # by the session that decodes
        session = model.open(1)
        for place, anchor in enumerate(ANCHORS):
            got = session.logits([Window(0, torch.tensor(ROW.tokens[: anchor + 1]), masks)])[0]
            torch.testing.assert_close(got[:, learner.draft_vocab], live[0, place], atol=1e-4, rtol=0)


def test_the_attention_opens_from_causal_to_full(tmp_path: Path) -> None:
    """Nothing later is seen at first, so what stands behind a token cannot move its row; at the end it can."""
    learner = MaskedLearner(tiny(tmp_path, "dream"), window=WINDOW, vocab_size=VOCAB, opening=0.5)
    batch, generator = batch_for(learner), torch.Generator()
    shown = torch.zeros(1, len(ANCHORS), WINDOW, dtype=torch.bool)
    shown[..., -1] = True  # the last token of each window instead of a mask

    def first_rows(progress: float, visible: torch.Tensor | None) -> torch.Tensor:
        generator.manual_seed(1)
        with torch.no_grad():
            return learner.states(batch, shown=visible, progress=progress, generator=generator)[0, :2, 0]

    assert torch.equal(first_rows(0.0, shown), first_rows(0.0, None))
    for progress in (0.5, 1.0):
        assert not torch.allclose(first_rows(progress, shown), first_rows(progress, None))
    assert torch.equal(first_rows(0.5, None), first_rows(1.0, None))
    assert not torch.allclose(first_rows(0.25, None), first_rows(1.0, None))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    lm = tiny(tmp_path, "dream")
    limit = lm.config.max_window
    assert limit is not None
    with pytest.raises(InputError, match=f"window: expected at most {limit}"):
        MaskedLearner(lm, window=limit + 1, vocab_size=VOCAB)
    with pytest.raises(InputError, match="opening: expected a share"):
        MaskedLearner(lm, window=WINDOW, vocab_size=VOCAB, opening=1.5)
    for rank, alpha in ((0, 8.0), (4, 0.0)):
        with pytest.raises(InputError, match="LoRA rank and alpha"):
            add_lora(lm, rank=rank, alpha=alpha)
