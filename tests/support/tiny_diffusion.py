"""Tiny random checkpoints of every family, as their publishers would lay them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdiff.models.diffusion import DiffusionLM
from support.reference_diffusion import HUGGING_FACE, LLADA, Architecture

VOCAB, MASK, EOS, HIDDEN, INNER, LAYERS, HEADS, CONTEXT = 48, 45, 2, 32, 40, 2, 4, 64
FAMILIES = ("dream", "llada", "diffullama", "sdar")

_HF_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "hidden_act": "silu",
    "eos_token_id": EOS, "mask_token_id": MASK, "tie_word_embeddings": False,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "dream": {
        "model_type": "Dream", "architectures": ["DreamModel"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": None, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
        "auto_map": {"AutoModel": "modeling_dream.DreamModel"}, **_HF_SIZES,
    },
    "llada": {
        "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": HIDDEN, "n_layers": LAYERS,
        "n_heads": HEADS, "n_kv_heads": 2, "mlp_hidden_size": INNER, "mlp_ratio": 4, "vocab_size": VOCAB,
        "embedding_size": VOCAB, "max_sequence_length": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope": True, "rope_full_precision": True, "alibi": False, "weight_tying": False, "include_bias": False,
        "include_qkv_bias": False, "bias_for_layer_norm": False, "attention_layer_norm": False,
        "input_emb_norm": False, "scale_logits": False, "activation_type": "silu", "block_type": "llama",
        "block_group_size": 1, "layer_norm_type": "rms", "layer_norm_with_affine": True, "multi_query_attention": None,
        "eos_token_id": EOS, "pad_token_id": EOS, "mask_token_id": MASK,
        "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    },
    "diffullama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **_HF_SIZES,
    },
    "sdar": {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "head_dim": 16, "attention_bias": False, "block_size": 4, "fuse_cross_entropy": True,
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}, **_HF_SIZES,
    },
}  # fmt: skip

SHIFTED = {"dream": True, "llada": False, "diffullama": True, "sdar": False}


def architecture(family: str) -> Architecture:
    """What the reference needs to know of `CONFIGS`."""
    config = CONFIGS[family]
    return Architecture(
        layers=LAYERS, heads=HEADS, kv_heads=2, head_dim=config.get("head_dim", HIDDEN // HEADS),
        theta=config.get("rope_theta", 10000.0), eps=config["rms_norm_eps"],
        names=LLADA if family == "llada" else HUGGING_FACE, block=config.get("block_size"),
    )  # fmt: skip


def weights(family: str, *, tied: bool = False, seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Random float64 weights under the published names."""
    arch, generator = architecture(family), torch.Generator().manual_seed(seed)
    width = arch.heads * arch.head_dim

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    shapes = {
        "q": (width, HIDDEN), "k": (2 * arch.head_dim, HIDDEN), "v": (2 * arch.head_dim, HIDDEN), "o": (HIDDEN, width),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
    }  # fmt: skip
    state = {"table": rand(VOCAB, HIDDEN) * 5, "norm": 1 + rand(HIDDEN)}
    if not tied:
        state["head"] = rand(VOCAB, HIDDEN)
    named = {f"{arch.names[n]}.weight": t for n, t in state.items()}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            path = arch.names[name].format(layer)
            named[f"{path}.weight"] = rand(*shape)
            if family == "dream" and name in "qkv":
                named[f"{path}.bias"] = rand(shape[0])
        for name in ("before_attention", "before_mlp"):
            named[f"{arch.names[name].format(layer)}.weight"] = 1 + rand(HIDDEN)
        if family == "sdar":
            for name in ("q_norm", "k_norm"):
                named[f"{arch.names[name].format(layer)}.weight"] = 1 + rand(arch.head_dim)
    return named


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint folder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def checkpoint(
    directory: Path,
    family: str,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write a random checkpoint of a family; ``changes`` go into its config.json (None removes a key)."""
    config = {**CONFIGS[family], "weight_tying" if family == "llada" else "tie_word_embeddings": tied, **changes}
    tensors = {name: tensor.to(dtype) for name, tensor in weights(family, tied=tied, seed=seed).items()}
    return write(directory, {k: v for k, v in config.items() if v is not None}, tensors)


def tiny(directory: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> DiffusionLM:
    """A random model of a family."""
    folder = checkpoint(directory, family, seed=seed, dtype=dtype)
    return DiffusionLM.from_pretrained(folder, family="diffullama" if family == "diffullama" else None)
