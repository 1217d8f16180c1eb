"""Taking layers out of a transformers decoder, for drafters that start from the target's own weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdiff.errors import UnsupportedModelError

_NOT_ARCHITECTURE = ("architectures", "transformers_version", "_name_or_path", "dtype", "model_type", "use_cache")
_LABEL_FIELDS = ("id2label", "label2id")
_PER_LAYER_FIELDS = ("layer_types", "no_rope_layers", "mlp_layer_types")
_SAMPLED_ROWS = 256


def find_layer_list(decoder: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Find a decoder's list of layers, whatever its family calls it.

    Args:
        decoder: an inner decoder (no output head).

    Returns:
        The list's dotted name and the list.

    Raises:
        ValueError: not exactly one list has ``num_hidden_layers`` entries.
    """
    count = decoder.config.num_hidden_layers
    found = [(n, m) for n, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        names = [n for n, _ in found]
        raise UnsupportedModelError(
            f"target: expected one list of {count} layers in {type(decoder).__name__}, got {names}; "
            "this architecture needs its own adapter"
        )
    return found[0]


def shrink_config(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return a decoder configuration for some of its layers, as a JSON-able dictionary.

    Args:
        config: the whole decoder's configuration.
        layers: indices of the layers to keep, in order.

    Returns:
        The configuration with ``num_hidden_layers`` and the per-layer fields reduced.
    """
    data = config.to_dict()
    for name in (
        "architectures",
        "transformers_version",
        "_name_or_path",
        "dtype",
        "model_type",
        "use_cache",
        "id2label",
        "label2id",
    ):
        data.pop(name, None)
    for name in _PER_LAYER_FIELDS:
        if isinstance(data.get(name), list) and len(data[name]) == config.num_hidden_layers:
            data[name] = [data[name][i] for i in layers]
    data["num_hidden_layers"] = len(layers)
    return json.loads(json.dumps(data))  # as it will read after saving: keys become strings, tuples lists


def layer_subset_state(decoder: PreTrainedModel, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of a decoder that keeps some layers and has no embedding table.

    Args:
        decoder: the whole inner decoder.
        layers: indices of the layers to keep; they are renumbered in this order.

    Returns:
        A state dictionary for the smaller decoder.
    """
    prefix = find_layer_list(decoder)[0] + "."
    table = decoder.get_input_embeddings()
    table_name = next(n for n, m in decoder.named_modules() if m is table) + "."
    state = decoder.state_dict()
    kept = {k: v for k, v in state.items() if not k.startswith((prefix, table_name))}
    for new, old in enumerate(layers):
        start = f"{prefix}{old}."
        kept |= {f"{prefix}{new}.{k.removeprefix(start)}": v for k, v in state.items() if k.startswith(start)}
    return kept


def target_fingerprint(embedding: Tensor, head_weight: Tensor) -> str:
    """Return a short digest that tells one target's table and head from another's.

    Values are compared in bf16, so the same bf16 checkpoint loaded in fp32 has the same fingerprint.

    Args:
        embedding: [V, H] embedding table.
        head_weight: [V, H] output head.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for weight in (embedding, head_weight):
        digest.update(repr(tuple(weight.shape)).encode())
        step = max(1, weight.shape[0] // _SAMPLED_ROWS)
        sample = weight.detach()[::step].to("cpu", torch.bfloat16).contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
