"""What a drafter in training is worth, measured by the code that decodes: the loop, the rules, the target itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdiff.control.defaults import SAMPLED_SHAPES
from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.records import Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import BestFirst, Budget, Chain, Shape

_NEAR_ARGMAX = 1e-4


@dataclass(frozen=True)
class Case:
    """A shape at a temperature; the rule is the loop's choice for it."""

    name: str
    shape: Shape
    temperature: float
    draft_temperature: float = 1.0


def cases(nodes: int) -> tuple[Case, ...]:
    """Chain and tree at temperature 0; chain, siblings and tree at 1."""
    return (
        Case("chain, T = 0", Chain(), 0.0, draft_temperature=_NEAR_ARGMAX),
        Case("tree, T = 0", BestFirst(nodes), 0.0),
        Case("chain, T = 1", Chain(), 1.0),
        Case("siblings, T = 1", SAMPLED_SHAPES[0], 1.0),
        Case("tree, T = 1", BestFirst(nodes), 1.0),
    )


class DecodingEvaluator:
    """Decodes held-out prompts with given weights, as one ragged batch a case.

    Args:
        target: the frozen target, loaded. denoiser: the one in training; its weights and attention are not touched.
        prompts: token ids. max_new_tokens: of each. nodes: of the trees. seed: of the sampled cases.
    """

    def __init__(
        self,
        target: CausalTarget,
        denoiser: BlockCausalDenoiser,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        nodes: int,
        seed: int = 0,
    ) -> None:
        self._target = target
        self._prompts = [torch.tensor(p, dtype=torch.int64) for p in prompts]
        self._stop = StopOptions(max_new_tokens=max_new_tokens)
        self._cases, self._seed = cases(nodes), seed
        dtype = denoiser.embedding_weight.dtype
        self._twin = BlockCausalDenoiser(  # with the attention that decoding uses
            denoiser.config,
            target_embedding=embedding_table(target.model).detach().to(dtype),
            target_head_weight=output_table(target.model).detach().to(dtype),
            draft_vocab=denoiser.draft_vocab,
        )
        self._drafter = MarginalDrafter(BlockCausalSource(self._twin))

    def __call__(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Tokens a round and acceptance by position of every case.

        Args:
            state: weights by name, as `BlockCausalDenoiser.save_pretrained` takes them.
        """
        self._twin.load_state_dict(dict(state))
        return {case.name: self._measure(case) for case in self._cases}

    def _measure(self, case: Case) -> dict[str, Any]:
        requests = [
            Request(
                prompt=prompt,
                sampling=SamplingOptions(temperature=case.temperature),
                stop=self._stop,
                seed=self._seed,
                index=index,
            )
            for index, prompt in enumerate(self._prompts)
        ]
        budget = Budget(gamma=self._twin.window, shape=case.shape, temperature=case.draft_temperature)
        loop = DecodeLoop(self._target, self._drafter, requests, budget=budget)
        for _ in loop.run():
            pass
        totals = Totals.of([record for row in loop.rows for record in row.rounds])
        return {
            "tau": round(totals.tau, 4),
            "acceptance_by_position": [round(x, 4) for x in totals.acceptance_by_position],
            "rounds": totals.rounds,
        }
