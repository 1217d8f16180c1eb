"""The law of texts drafted by an EAGLE head, on a tiny target whose joint law is computed by plain passes.

The default suite runs each shape with few sequences; ``-m proof`` at more gammas and temperatures, with many.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.eagle import EagleDrafter
from specdiff.models.eagle import EagleHead
from specdiff.models.target import CausalTarget
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import Budget, DynamicTree, Shape, StaticTree
from statistical.law import LEVEL, V, p_value
from support.drafting import llama

PROMPT = torch.tensor([2, 1, 3])
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))
SHAPES: dict[str, Shape] = {
    "static": StaticTree(PATHS),
    "sampled": StaticTree(PATHS, sampled=True),
    "dynamic": DynamicTree(8, 3),
}
FEW, MANY = 600, 20_000


@torch.inference_mode()
def joint_law(model: LlamaForCausalLM, temperature: float) -> Tensor:
    """Law [V, V, V] of the three tokens after the prompt."""
    law = torch.zeros(V, V, V, dtype=torch.float64)
    texts = torch.tensor([[*PROMPT, a, b] for a, b in itertools.product(range(V), range(V))])
    p = torch.softmax(model(input_ids=texts).logits.double() / temperature, dim=-1)
    for n, (a, b) in enumerate(itertools.product(range(V), range(V))):
        law[a, b] = p[n, 2, a] * p[n, 3, b] * p[n, 4]
    return law


@torch.inference_mode()
def texts_of(
    model: LlamaForCausalLM, drafter: EagleDrafter, budget: Budget, temperature: float, count: int
) -> tuple[Tensor, float]:
    """Three tokens of each of so many texts, and how many drafted ones a round accepted."""
    texts: list[list[int]] = []
    accepted, rounds = 0, 0
    for first in range(0, count, 1000):
        requests = [
            Request(
                prompt=PROMPT, sampling=SamplingOptions(temperature=temperature), seed=11, index=i,
                stop=StopOptions(max_new_tokens=4),
            )
            for i in range(first, min(first + 1000, count))
        ]  # fmt: skip
        loop = DecodeLoop(CausalTarget(model), drafter, requests, budget=budget)
        for _ in loop.run():
            pass
        texts += [row.new_tokens[:3] for row in loop.rows]
        accepted += sum(r.accepted for row in loop.rows for r in row.rounds)
        rounds += sum(len(row.rounds) for row in loop.rows)
    return torch.tensor(texts), accepted / rounds


@pytest.mark.parametrize(
    ("name", "gamma", "temperature", "count"),
    [
        *(pytest.param(name, 2, 1.0, FEW, id=f"{name}-{FEW}") for name in SHAPES),
        *(
            pytest.param(*case, MANY, id="-".join(map(str, case)), marks=pytest.mark.proof)
            for case in itertools.product(SHAPES, (1, 2, 3), (0.5, 1.0, 2.0))
        ),
    ],
)
def test_the_law_of_texts_is_the_targets(name: str, gamma: int, temperature: float, count: int) -> None:
    model = llama(5, vocab=V)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = EagleDrafter(EagleHead(model))
    budget = Budget(gamma=gamma, shape=SHAPES[name], temperature=0.8)
    tokens, accepted = texts_of(model, drafter, budget, temperature, count)
    assert accepted > 0.3  # drafts take part in what is measured
    assert p_value(tokens, joint_law(model, temperature)) >= LEVEL
    assert p_value(tokens, joint_law(model, temperature * 3)) < LEVEL  # so few texts tell another law apart
