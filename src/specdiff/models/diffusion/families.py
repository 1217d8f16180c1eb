"""The families of masked diffusion LMs that transformers' own Llama, Qwen2 and Qwen3 modules can run.

No remote code is run and none is copied: a family is a handful of facts, a reading of the published configuration, and
a renaming of the published weights. Facts as in the models' published code:

| family | shape | mask id | logits | attention |
|---|---|---|---|---|
| ``dream`` (Dream, DiffuCoder) | Qwen2.5 | 151666 | shifted | full |
| ``llada`` (LLaDA) | LLaMA-like | 126336 | not shifted | full |
| ``diffullama`` (DiffuLLaMA) | LLaMA-2 | 811, an ordinary word chosen as mask | shifted | full |
| ``sdar`` (SDAR) | Qwen3 | 151669 | not shifted | block-causal, 4 tokens unless the checkpoint says else |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from specdiff.errors import CheckpointError, InputError, PairingError, UnsupportedModelError
from specdiff.models.diffusion.config import Attention
from specdiff.models.diffusion.keys import DDM_WRAPPER, LLADA, PLAIN, KeyMap

Raw = Mapping[str, Any]
"""A published ``config.json``."""

SAVED = "specdiff"
"""Section of ``config.json`` in which `DiffusionLM.save_pretrained` keeps what the published format cannot say."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is the same for all checkpoints of a family.

    Attributes:
        name: the name used in code and files.
        model_types: lower-case ``model_type`` values that may be loaded as this family.
        own_types: those of them that say by themselves which family it is.
        shift, attention, block_size, mask_id: see `MaskedDenoiserConfig`; the defaults of the published models.
        backbone: published configuration -> configuration of the transformers module, tying left open.
        tied_key: key of the published configuration that ties the output head to the embedding table.
        keys: names of the published weights.
        other_keys: names that some checkpoints of the family have instead; read, never written.
    """

    name: str
    model_types: frozenset[str]
    own_types: frozenset[str]
    shift: bool
    attention: Attention
    block_size: int
    mask_id: int
    backbone: Callable[[Raw], PretrainedConfig]
    tied_key: str = "tie_word_embeddings"
    keys: KeyMap = PLAIN
    other_keys: KeyMap = PLAIN

    def our_key(self, key: str) -> str:
        """The name in our module of a weight of any checkpoint of the family."""
        return self.other_keys.ours(self.keys.ours(key))


_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "attention_dropout")


def _qwen2(raw: Raw) -> PretrainedConfig:
    if raw.get("attention_bias") is False:
        raise UnsupportedModelError(
            "config.json: expected attention_bias true or absent (query, key and value have biases in Qwen2), got "
            "false; this checkpoint is no Qwen2 shape"
        )
    return Qwen2Config(**_sizes(raw, without=("head_dim",)), rope_parameters=_rope(raw))


def _qwen3(raw: Raw) -> PretrainedConfig:
    return Qwen3Config(**_sizes(raw), attention_bias=bool(raw.get("attention_bias", False)), rope_parameters=_rope(raw))


def _llama(raw: Raw) -> PretrainedConfig:
    return LlamaConfig(
        **_sizes(raw), attention_bias=bool(raw.get("attention_bias", False)), mlp_bias=bool(raw.get("mlp_bias", False)),
        rope_parameters=_rope(raw, theta=10_000.0),
    )  # fmt: skip


_LLADA_MUST: Raw = MappingProxyType({
    "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "alibi": False,
    "attention_layer_norm": False, "input_emb_norm": False, "scale_logits": False, "include_bias": False,
    "include_qkv_bias": False, "bias_for_layer_norm": False, "block_group_size": 1, "layer_norm_with_affine": True,
})  # fmt: skip
"""The settings of the released LLaDA models; absent keys count as these."""


def _llada(raw: Raw) -> PretrainedConfig:
    for key, must in _LLADA_MUST.items():
        got = raw.get(key)
        if got is not None and got != must:
            raise UnsupportedModelError(
                f"config.json: expected {key} {must!r} as in the released LLaDA models, got {got!r}; this variant has "
                "another architecture and cannot be run by transformers' Llama"
            )
    heads, width = _needed(raw, "n_heads"), _needed(raw, "d_model")
    kv_heads = 1 if raw.get("multi_query_attention") else raw.get("n_kv_heads") or heads
    return LlamaConfig(
        vocab_size=raw.get("embedding_size") or _needed(raw, "vocab_size"), hidden_size=width,
        intermediate_size=raw.get("mlp_hidden_size") or _needed(raw, "mlp_ratio") * width,
        num_hidden_layers=_needed(raw, "n_layers"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=_needed(raw, "max_sequence_length"), rms_norm_eps=_needed(raw, "rms_norm_eps"),
        rope_parameters=_rope(raw),
    )  # fmt: skip


def _sizes(raw: Raw, without: tuple[str, ...] = ()) -> dict[str, Any]:
    if raw.get("use_sliding_window") or raw.get("use_mrope"):
        raise UnsupportedModelError(
            "config.json: expected no sliding window and no multi-axis rotary embedding, got one; "
            "a masked denoiser sees its whole context"
        )
    sizes = {key: _needed(raw, key) for key in _SHARED}
    return sizes | {key: raw[key] for key in _OPTIONAL if key not in without and raw.get(key) is not None}


def _needed(raw: Raw, key: str) -> Any:
    if raw.get(key) is None:
        raise CheckpointError(f"config.json: expected a value for {key!r}, got none; fetch the file again")
    return raw[key]


def _rope(raw: Raw, theta: float | None = None) -> dict[str, Any]:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    if "rope_theta" not in scaling:
        scaling["rope_theta"] = raw.get("rope_theta") or theta or _needed(raw, "rope_theta")
    return scaling


_ALL = (
    Family(
        name="dream", model_types=frozenset({"dream", "qwen2"}), own_types=frozenset({"dream"}), shift=True,
        attention="full", block_size=1, mask_id=151666, backbone=_qwen2,
    ),
    Family(
        name="llada", model_types=frozenset({"llada"}), own_types=frozenset({"llada"}), shift=False, attention="full",
        block_size=1, mask_id=126336, backbone=_llada, tied_key="weight_tying", keys=LLADA,
    ),
    Family(
        name="diffullama", model_types=frozenset({"llama"}), own_types=frozenset(), shift=True, attention="full",
        block_size=1, mask_id=811, backbone=_llama, other_keys=DDM_WRAPPER,
    ),
    Family(
        name="sdar", model_types=frozenset({"sdar", "qwen3"}), own_types=frozenset({"sdar"}), shift=False,
        attention="block", block_size=4, mask_id=151669, backbone=_qwen3,
    ),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})
"""Every family by name; read-only."""

_ALIASES = {"diffucoder": "dream"}


def is_diffusion(raw: Raw) -> bool:
    """Whether a configuration says by itself that it is a masked diffusion LM of a known family."""
    try:
        find_family(raw)
    except UnsupportedModelError:
        return False
    except InputError:  # it says so, but not soundly: loading tells what is wrong
        return True
    return True


def find_family(raw: Raw, asked: str | None = None) -> Family:
    """The family of a published configuration.

    Args:
        raw: ``config.json``.
        asked: the caller's word for it, or None to tell by the configuration.

    Raises:
        InputError: no such family. PairingError: the configuration is not of the family asked for.
        UnsupportedModelError: the configuration alone does not say, or the architecture is not known.
    """
    model_type = str(raw.get("model_type", "")).lower()
    saved = raw.get(SAVED)
    name = asked if asked is not None else saved.get("family") if isinstance(saved, Mapping) else None
    if name is not None:
        family = FAMILIES.get(_ALIASES.get(name, name))
        if family is None:
            raise InputError.of(
                "family",
                expected="one of " + ", ".join([*FAMILIES, *_ALIASES]),
                got=name,
                remedy="leave it out to have it told by config.json",
            )
        if model_type not in family.model_types:
            raise PairingError.of(
                "family",
                expected=f"a checkpoint of model type {' or '.join(sorted(family.model_types))} for {name!r}",
                got=model_type,
                remedy="leave the family out to have it told by config.json",
            )
        return family
    for family in _ALL:
        if model_type in family.own_types:
            return family
    if "DiscreteDiffusionModel" in (raw.get("architectures") or ()) and model_type == "llama":
        return FAMILIES["diffullama"]
    if any(model_type in family.model_types for family in _ALL):
        fits = ", ".join(repr(family.name) for family in _ALL if model_type in family.model_types)
        raise UnsupportedModelError(
            f"family: expected a masked diffusion LM, got a configuration of model type {model_type!r}, which "
            f"autoregressive models have too; if its weights are a denoiser's, say so with family={fits}"
        )
    code = " and asks for remote code, which is never run" if raw.get("auto_map") else ""
    raise UnsupportedModelError(
        f"family: expected one of {', '.join([*FAMILIES, *_ALIASES])}, got model type {raw.get('model_type')!r}{code}; "
        "use a checkpoint of one of these families"
    )
