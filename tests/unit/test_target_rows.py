"""The target's rows under packed windows are those of a plain pass over each answer."""

from __future__ import annotations

import pytest
import torch

from specdiff.errors import UnsupportedModelError
from specdiff.train.target_rows import TargetPass
from specdiff.train.windows import AnswerRow, label_table, pack
from support.tiny_targets import VOCAB, fresh_logits, tiny_model

ROWS = [AnswerRow(id=str(n), tokens=tuple(range(2, 2 + n)), prompt_length=3) for n in (12, 8)]
ANCHORS = [[2, 5, 10], [3, 6]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_rows_equal_a_plain_pass(family: str) -> None:
    target, columns = tiny_model(family), torch.arange(0, VOCAB, 2)
    batch = pack(ROWS, ANCHORS, window=4, labels_of=label_table(columns, VOCAB))
    rows = TargetPass(target, columns)(batch)
    seen = 0
    for b, (row, anchors) in enumerate(zip(ROWS, ANCHORS, strict=True)):
        plain = torch.log_softmax(fresh_logits(target, torch.tensor(row.tokens)), dim=-1)[:, columns]
        for a, anchor in enumerate(anchors):
            for k in range(4):
                assert bool(batch.reached[b, a, k]) == (anchor + 1 + k < len(row.tokens))
                if batch.reached[b, a, k]:
                    assert int(batch.following[b, a, k]) == row.tokens[anchor + 1 + k]
                    got = rows(torch.tensor([(b * 3 + a) * 4 + k]))[0]
                    torch.testing.assert_close(got, plain[anchor + k], atol=1e-5, rtol=1e-5)
                    seen += 1
    assert not batch.reached[1, 2].any()  # the window that only fills up the batch
    assert seen == 14


def test_targets_that_change_their_logits_are_refused() -> None:
    target = tiny_model("llama")
    target.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping = 30"):
        TargetPass(target, torch.arange(VOCAB))
