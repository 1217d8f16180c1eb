"""What the drafter tests share: tiny random models, plain greedy decoding, and requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.models.target import CausalTarget
from specdiff.randomness import RandomStream
from specdiff.records import RoundEvent
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import Budget
from specdiff.verify.base import Rule

VOCAB = 48
PROMPTS = (torch.tensor([5, 9, 11, 5, 9]), torch.tensor([7]), torch.arange(3, 14))
"""Three ragged prompts."""


def llama(seed: int, *, vocab: int = VOCAB, dtype: torch.dtype = torch.float32, context: int = 512) -> LlamaForCausalLM:
    """A random two-layer Llama whose next tokens depend on all that came before; it never ends a text."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def logits_after(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits [V] after ``ids``, by a fresh pass without any cache."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def plain(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> list[int]:
    """Greedy continuation, one fresh pass a token."""
    ids = prompt.tolist()
    for _ in range(new_tokens):
        ids.append(int(logits_after(model, ids).argmax()))
    return ids[prompt.numel() :]


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    budget: Budget,
    *,
    prompts: Sequence[Tensor] = PROMPTS,
    first: int = 0,
    new_tokens: int = 30,
    temperature: float = 0.0,
    rule: Rule | None = None,
) -> tuple[DecodeLoop, list[RoundEvent]]:
    """Decode a batch to its end; the loop, and what its hook heard. ``first`` is the index of the first prompt."""
    events: list[RoundEvent] = []
    requests = [
        Request(prompt=p, index=i, stop=StopOptions(max_new_tokens=new_tokens), seed=3,
                sampling=SamplingOptions(temperature=temperature))
        for i, p in enumerate(prompts, start=first)
    ]  # fmt: skip
    loop = DecodeLoop(CausalTarget(model), drafter, requests, budget=budget, rule=rule, on_round=events.append)
    for _ in loop.run():
        pass
    return loop, events


def ask(row: int, prefix: Sequence[int] | Tensor, budget: Budget, *, seed: int = 0) -> DraftRequest:
    """A request with a draft stream of its own."""
    ids = torch.as_tensor(prefix, dtype=torch.int64)
    return DraftRequest(row=row, prefix=ids, budget=budget, random=RandomStream(seed, "draft", row))


def line(tokens: Tensor, parents: Sequence[int], node: int) -> list[int]:
    """Tokens from the root down to ``node``; -1 gives none."""
    found: list[int] = []
    while node >= 0:
        found.append(int(tokens[node]))
        node = parents[node]
    return found[::-1]
