"""Tiny denoisers that were really trained: they fill gaps in repeated patterns."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff.models.diffusion import DiffusionLM, MaskedDenoiserConfig

_VOCAB, _PERIOD, _REPEATS, _BATCH = 24, 8, 4, 8
COPY_MASK = 23
"""The mask id it is trained with; all smaller ids are ordinary tokens."""


def copying(*, shift: bool, steps: int = 140) -> DiffusionLM:
    """Train a denoiser with full attention: masked tokens are those a period away, visible tokens are themselves.

    Some visible tokens break the pattern, so that only the mask invites copying.

    Args:
        shift: whether its row i - 1 is trained to predict token i, or its row i.
        steps: of the optimizer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": _VOCAB, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }  # fmt: skip
        backbone = LlamaForCausalLM(LlamaConfig(**sizes))
        config = MaskedDenoiserConfig(family="diffullama", vocab_size=_VOCAB, mask_id=COPY_MASK, shift=shift)
        model = DiffusionLM(config, backbone, {"model_type": "llama", **sizes})
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20)
            tokens = torch.stack([torch.randperm(COPY_MASK)[:_PERIOD] for _ in range(_BATCH)]).repeat(1, _REPEATS)
            odd, hidden = (torch.rand(tokens.shape) < share for share in (0.1, 0.2))
            labels = torch.where(odd & ~hidden, torch.randint(0, COPY_MASK, tokens.shape), tokens)
            inputs = labels.masked_fill(hidden, COPY_MASK)
            rows = torch.stack(model.rows(list(inputs), [(1, _PERIOD * _REPEATS)] * _BATCH))
            loss = cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()
