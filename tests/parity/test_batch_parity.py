"""Row 8: a row of a ragged batch says what it says alone, whatever its neighbours do and whenever they finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import DraftRequest
from specdiff.models.target import CausalTarget
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter
from specdiff.types import BestFirst, Budget, Draft
from support.tiny_targets import VOCAB, random_tree, tiny_model


class Guesser(ScriptedDrafter):
    """Random trees that depend on the prefix only."""

    def __init__(self) -> None:
        super().__init__(lambda r: [], vocab_size=VOCAB)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for r in requests:
            generator = torch.Generator().manual_seed(int(r.prefix.sum()) + len(r.prefix))
            tree = random_tree(generator, 9, vocab=12)  # few words, so that some are accepted
            while tree.depth > r.budget.gamma:
                tree = random_tree(generator, 4, vocab=12)
            drafts.append(Draft(tree))
        return drafts


def _requests(rows: int, temperature: float) -> list[Request]:
    generator = torch.Generator().manual_seed(rows)
    return [
        Request(
            prompt=torch.randint(0, VOCAB, (1 + 5 * (i % 4),), generator=generator),
            index=i,
            seed=11,
            stop=StopOptions(max_new_tokens=3 + (5 * i) % 13),
            sampling=SamplingOptions(temperature=temperature, top_k=8 if temperature else None),
        )
        for i in range(rows)
    ]


def _decode(model: PreTrainedModel, requests: Sequence[Request]) -> list[list[int]]:
    loop = DecodeLoop(CausalTarget(model), Guesser(), requests, budget=Budget(gamma=4, shape=BestFirst(9)))
    for _ in loop.run():
        pass
    assert [row.error for row in loop.rows] == [None] * len(requests)
    return [row.new_tokens for row in loop.rows]


SIZES = range(2, 9)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_neox", "mixtral"])
def test_rows_of_ragged_batches_equal_the_rows_alone(
    family: str, temperature: float, figure: Callable[..., None]
) -> None:
    model = tiny_model(family)
    requests = _requests(max(SIZES), temperature)
    alone = [_decode(model, [request])[0] for request in requests]
    assert [len(t) for t in alone] == [3 + (5 * i) % 13 for i in range(len(requests))]
    rows = different = 0
    for size in SIZES:
        picked = [(size + i) % len(requests) for i in range(size)]  # other neighbours for every size
        assert len({requests[i].prompt.numel() for i in picked}) > 1, "ragged"
        together = _decode(model, [requests[i] for i in picked])
        rows += size
        different += sum(got != alone[i] for got, i in zip(together, picked, strict=True))
    name = f"{family} at T={temperature}: rows of ragged batches against the row alone"
    figure(8, name, rows=rows, different=different, sizes=list(SIZES), architectures=[family])
    assert not different
