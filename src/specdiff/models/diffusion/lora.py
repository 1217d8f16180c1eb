"""LoRA adapters of a masked denoiser: added for training, and merged on the CPU in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdiff.errors import CheckpointError, InputError, UnsupportedModelError
from specdiff.hub.safety import read_json
from specdiff.models.diffusion.checkpoint import no_safetensors, tensors_of
from specdiff.models.diffusion.families import FAMILIES
from specdiff.models.diffusion.loading import cast_parameters
from specdiff.models.diffusion.model import DiffusionLM

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRAPPED = "base_model.model."  # PEFT's prefix of every tensor name
_ADAPTER, _BASE = "default", ".base_layer."  # peft's names of a first adapter and of the map it wraps
_SHARED = ("embed_tokens", "lm_head")  # what tied models share


def merge_lora(denoiser: DiffusionLM, directory: str | Path) -> DiffusionLM:
    """Merge a PEFT adapter folder into the weights, in place.

    The adapter may name modules as its family's published checkpoints do or as transformers does. A tied model whose
    adapter touches the embedding table or the output head is untied first: merged, the two are no longer equal.

    Args:
        denoiser: the model that the adapter was trained for.
        directory: holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
        The same denoiser.

    Raises:
        InputError: the ``peft`` package is not installed.
        CheckpointError: files are missing, pickles or damaged, or their tensors do not fit the model.
        UnsupportedModelError: the adapter is no LoRA.
    """
    peft = _peft()
    directory = Path(directory)
    family = FAMILIES[denoiser.config.family]
    settings = read_json(directory / ADAPTER_CONFIG)
    if settings.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"{directory / ADAPTER_CONFIG}: expected peft_type 'LORA', got {settings.get('peft_type')!r}; "
            "only LoRA adapters are merged"
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise no_safetensors(directory, ADAPTER_WEIGHTS)
    tensors = {
        _WRAPPED + family.our_key(name.removeprefix(_WRAPPED)): tensor.float()
        for name, tensor in tensors_of(directory / ADAPTER_WEIGHTS)
    }
    config = _lora_config(peft, settings, denoiser, directory)
    weight = denoiser.backbone.lm_head.weight
    device, dtype = weight.device, weight.dtype
    cast_parameters(denoiser.backbone, torch.float32, "cpu")
    try:
        if any(part in name.split(".") for name in tensors for part in _SHARED):
            _untie(denoiser)
        _merge(peft, denoiser, config, tensors, directory)
    finally:
        cast_parameters(denoiser.backbone, dtype, device)
    return denoiser


def add_lora(denoiser: DiffusionLM, *, rank: int, alpha: float) -> None:
    """Put adapters beside all linear maps of the layers and freeze everything else; the logits do not change yet.

    Args:
        denoiser: changed in place. rank: of the adapters. alpha: the adapters count ``alpha / rank``.

    Raises:
        InputError: the ``peft`` package is not installed, or a value is out of range.
    """
    peft = _peft()
    if rank < 1 or not 0 < alpha < float("inf"):
        raise InputError.of(
            "LoRA rank and alpha",
            expected="an integer >= 1 and a number > 0",
            got=(rank, alpha),
            remedy="try 16 and 32",
        )
    layers = cast(nn.Module, denoiser.decoder.layers)
    names = sorted({n.rsplit(".", 1)[-1] for n, m in layers.named_modules() if isinstance(m, nn.Linear)})
    denoiser.backbone.requires_grad_(False)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0)
    with _without_renaming_warning():
        peft.inject_adapter_in_model(config, denoiser.backbone)


def merged_weights(backbone: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the backbone has with the trained values in it, under plain names: CPU, its own dtypes.

    Args:
        backbone: with or without the adapters of `add_lora`; not changed.
        trained: values in place of the backbone's own, by its parameter names.

    Returns:
        Names as without adapters; each adapted weight is W + scale B A, added in float32.
    """
    own = {
        name: trained.get(name, tensor).detach().to("cpu", tensor.dtype)
        for name, tensor in backbone.state_dict().items()
    }
    plain = {name.replace(_BASE, "."): tensor for name, tensor in own.items() if ".lora_" not in name}
    for path, module in backbone.named_modules():
        name = f"{path}.lora_A.{_ADAPTER}.weight"
        if name in own:
            scale = float(cast(Any, module).scaling[_ADAPTER])
            down, up = (
                trained.get(n, own[n]).detach().to("cpu", torch.float32) for n in (name, name.replace("_A", "_B"))
            )
            weight = plain[f"{path}.weight"]
            plain[f"{path}.weight"] = (weight.float() + scale * (up @ down)).to(weight.dtype)
    return plain


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError.of(
            "peft",
            expected="the package 'peft', which makes and reads LoRA adapters",
            got="no such package",
            remedy="install specdiff with its 'peft' extra",
        ) from error
    return peft


@contextmanager
def _without_renaming_warning() -> Iterator[None]:
    with warnings.catch_warnings():  # peft reads a name that transformers has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _lora_config(peft: Any, settings: Mapping[str, Any], denoiser: DiffusionLM, directory: Path) -> Any:
    keys = FAMILIES[denoiser.config.family].keys
    fields = dict(settings)
    for field in ("target_modules", "modules_to_save"):
        if isinstance(fields.get(field), list):
            fields[field] = sorted({keys.our_leaf(name) for name in fields[field]})
    fields["inference_mode"] = True
    try:
        return peft.LoraConfig.from_peft_type(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG}: no LoRA settings ({error}); export the adapter again"
        ) from error


def _untie(denoiser: DiffusionLM) -> None:
    backbone = denoiser.backbone
    if backbone.config.tie_word_embeddings:
        backbone.lm_head.weight = nn.Parameter(backbone.lm_head.weight.detach().clone())
        backbone.config.tie_word_embeddings = False


def _merge(peft: Any, denoiser: DiffusionLM, config: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    try:
        with _without_renaming_warning():
            wrapped = peft.get_peft_model(denoiser.backbone, config)
    except ValueError as error:  # no module of these names
        raise CheckpointError(f"{directory}: the adapter does not fit this model ({error})") from error
    try:
        unknown = sorted(tensors.keys() - set(peft.get_peft_model_state_dict(wrapped)))
        missing = sorted(set(peft.get_peft_model_state_dict(wrapped)) - tensors.keys())
        if unknown or missing:
            raise CheckpointError(
                f"{directory}: expected the adapter tensors of its configuration, got missing {missing[:4]} and "
                f"unknown {unknown[:4]}; the adapter was trained for another model"
            )
        peft.set_peft_model_state_dict(wrapped, tensors)
        denoiser.backbone = wrapped.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        denoiser.backbone = wrapped.unload()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{directory}: the adapter does not fit this model ({error})") from error
