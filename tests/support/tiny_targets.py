"""Tiny random decoders of many families, as targets."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdiff.types import TokenTree

VOCAB = 97
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": _COMMON | _GROUPED,
    "qwen3": _COMMON | _GROUPED | {"head_dim": 8},
    "mistral": _COMMON | _GROUPED | {"sliding_window": 9},
    "gemma3_text": _COMMON
    | _GROUPED
    | {
        "head_dim": 8,
        "sliding_window": 9,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_neox": _COMMON,
    "mixtral": _COMMON | _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": _COMMON | _GROUPED | _EXPERTS | {"head_dim": 8, "num_experts": 4},
    "olmoe": _COMMON | _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _COMMON | _GROUPED,
    "phi": _COMMON,
    "gpt2": _GPT2,
    "gemma3n_text": _COMMON
    | _GROUPED
    | {
        "head_dim": 8,
        "sliding_window": 9,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
SIX = ("llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "mixtral")
"""The architectures of the parity table."""


def tiny_model(family: str, *, attention: str = "sdpa", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random fp32 model of a family, the same for the same seed."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def fresh_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [L, V] of a plain pass over ids [L], without cache or mask."""
    return model(input_ids=ids[None], use_cache=False).logits[0]


def random_tree(generator: torch.Generator, nodes: int, *, vocab: int = VOCAB) -> TokenTree:
    """A tree of random shape."""
    parents = [int(torch.randint(-1, n, (1,), generator=generator)) if n else -1 for n in range(nodes)]
    return TokenTree(torch.randint(0, vocab, (nodes,), generator=generator), tuple(parents))


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Node ids from the root's child down to ``node``; () for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path))
