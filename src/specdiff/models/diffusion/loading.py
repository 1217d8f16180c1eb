"""From a published checkpoint folder to a transformers module with its weights; no remote code, no pickles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdiff.errors import CheckpointError, InputError, PairingError, UnsupportedModelError
from specdiff.hub.safety import read_json
from specdiff.models.diffusion.checkpoint import CONFIG_NAME, read_json_if_any, tensors_of, weight_files
from specdiff.models.diffusion.config import Attention, MaskedDenoiserConfig
from specdiff.models.diffusion.families import SAVED, Family, find_family

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_BUFFERS = ("rotary_emb.inv_freq",)  # written by old releases; computed from the configuration


def read_config(
    directory: Path,
    *,
    family: str | None = None,
    mask_id: int | None = None,
    shift: bool | None = None,
    attention: Attention | None = None,
    block_size: int | None = None,
    name: str | None = None,
) -> tuple[MaskedDenoiserConfig, Family, dict[str, Any], PretrainedConfig]:
    """Read what kind of denoiser lies in a folder.

    Each fact is the caller's, else what `DiffusionLM.save_pretrained` wrote, else the checkpoint's own, else the
    family's.

    Returns:
        The facts, the family, the published configuration, and that of the module that runs it.

    Raises:
        CheckpointError, UnsupportedModelError, InputError: see `DiffusionLM.from_pretrained`.
    """
    raw = read_json(directory / CONFIG_NAME)
    kind = find_family(raw, family)
    try:
        backbone = kind.backbone(raw)
    except (StrictDataclassError, TypeError, ValueError, ArithmeticError) as error:  # transformers' own validation
        raise CheckpointError(f"{CONFIG_NAME}: expected sizes of a {kind.name} model, got {error}") from error
    saved = raw.get(SAVED) or {}
    if kind.attention == "full" and raw.get("block_size") and attention is None and "attention" not in saved:
        raise UnsupportedModelError(
            f"{CONFIG_NAME}: a {kind.name} model with block_size {raw['block_size']} is a block-causal variant, whose "
            "logits may be aligned otherwise; state attention='block' and shift to load it"
        )
    chosen: Attention = attention or saved.get("attention", kind.attention)
    if block_size is None:
        own: int = saved.get("block_size") or raw.get("block_size") or kind.block_size
        block_size = own if chosen == "block" else 1
    config = MaskedDenoiserConfig(
        family=kind.name,
        vocab_size=backbone.vocab_size,
        mask_id=mask_id if mask_id is not None else _mask_id(directory, raw, kind, backbone.vocab_size),
        shift=shift if shift is not None else saved.get("shift", kind.shift),
        attention=chosen,
        block_size=block_size,
        context=backbone.max_position_embeddings,
        eos_ids=_eos_ids(directory, raw),
        name=name or saved.get("name") or directory.name,
    )
    return config, kind, raw, backbone


def _mask_id(directory: Path, raw: Mapping[str, Any], kind: Family, vocab_size: int) -> int:
    saved = (raw.get(SAVED) or {}).get("mask_id")
    if saved is not None:
        return saved
    stated, tokenizers = raw.get("mask_token_id"), tokenizer_mask_id(directory)
    if stated is not None and tokenizers is not None and stated != tokenizers:
        raise PairingError.of(
            "mask_id",
            expected=f"one mask id, config.json says {stated}",
            got=f"{tokenizers} in tokenizer_config.json",
            remedy="pass the mask_id that the weights were trained with",
        )
    for found in (stated, tokenizers):
        if found is not None:
            return found
    if kind.mask_id >= vocab_size:
        raise InputError.of(
            "mask_id",
            expected=f"a mask token id in {CONFIG_NAME} or tokenizer_config.json",
            got=None,
            remedy=f"pass mask_id; {kind.mask_id}, that of the published {kind.name} models, is beyond this "
            f"vocabulary of {vocab_size}",
        )
    return kind.mask_id


def tokenizer_mask_id(directory: Path) -> int | None:
    """Id of the mask token that ``tokenizer_config.json`` names, None where it names none."""
    settings = read_json_if_any(directory / "tokenizer_config.json")
    token = settings.get("mask_token")
    content = token.get("content") if isinstance(token, Mapping) else token
    added = settings.get("added_tokens_decoder")
    if content is None or not isinstance(added, Mapping):
        return None
    for key, entry in added.items():
        if isinstance(entry, Mapping) and entry.get("content") == content and str(key).isdigit():
            return int(key)
    return None


def _eos_ids(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (raw, read_json_if_any(directory / "generation_config.json")):
        eos = source.get("eos_token_id")
        ids.update(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
    return tuple(sorted(ids))


def load_backbone(
    directory: Path,
    config: PretrainedConfig,
    kind: Family,
    raw: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Build the module and give it the published weights, tensor by tensor.

    Args:
        directory: checkpoint folder.
        config: of the module.
        kind: the family.
        raw: the published configuration.
        dtype: of all weights; None = that of the embedding table as stored.
        device: where the weights go.
        attn_implementation: ``sdpa`` or ``eager``.

    Raises:
        CheckpointError: files are missing, truncated or pickles, or their tensors are not those of the configuration.
    """
    state: dict[str, Tensor] = {}
    for path in weight_files(directory):
        for published, tensor in tensors_of(path, device):
            if not published.endswith(_BUFFERS):
                state[kind.our_key(published)] = tensor if dtype is None else tensor.to(dtype)
    tied = raw.get(kind.tied_key)
    config.tie_word_embeddings = bool(tied) if tied is not None else _HEAD not in state
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    except RuntimeError as error:
        raise CheckpointError(f"{directory / CONFIG_NAME}: no model has such sizes ({error}); fetch it anew") from error
    if config.tie_word_embeddings and _TABLE in state:
        state[_HEAD] = state[_TABLE]
    _check(model, state, directory)
    kept = state[_TABLE].dtype
    model.load_state_dict({name: tensor.to(kept) for name, tensor in state.items()}, strict=True, assign=True)
    model.tie_weights()
    # Its frequencies are no weights: they were left on the meta device, and stay float32 in every dtype.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model.eval()


def _check(model: PreTrainedModel, state: Mapping[str, Tensor], directory: Path) -> None:
    expected = model.state_dict()
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: expected the tensors of its {CONFIG_NAME}, got missing {missing[:4]} and unknown "
            f"{unknown[:4]}; weights and configuration are of different models"
        )
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{directory}: expected {name} of shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}; "
                "weights and configuration are of different models"
            )


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype, device: torch.device | str) -> None:
    """Move a module; buffers keep their dtype (rotary frequencies in bf16 would misplace distant tokens)."""
    nn.Module.to(model, device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
