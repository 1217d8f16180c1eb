"""Load a target: safetensors only, no code from the checkpoint, numerics as asked for, and a check that it works."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig

from specdiff.checking import flag
from specdiff.errors import CheckpointError, DownloadError, InputError, ModelError, UnsupportedModelError
from specdiff.hub.safety import check_folder
from specdiff.models.prepacked import prepack as prepack_layers
from specdiff.models.target import CausalTarget

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_target(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    tp_plan: str | dict[str, str] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    tf32: bool = False,
    quantization_config: Any = None,
    revision: str | None = None,
    prepack: bool = True,
) -> tuple[CausalTarget, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, and check that it scores token trees (`CausalTarget.self_check`).

    Args:
        path_or_id: a folder with ``config.json`` and safetensors, or a Hugging Face id.
        dtype: ``"auto"`` (the checkpoint's), ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch dtype.
        device: where all weights go; None = the first CUDA device, else the CPU.
        device_map: accelerate's placement instead, e.g. ``"auto"``.
        tp_plan: tensor parallelism instead, e.g. ``"auto"``; run under ``torchrun``, every rank makes the same calls.
        attn_implementation: ``"sdpa"`` or ``"eager"``; None = the best of both that the model has.
        trust_remote_code: allow Python code that comes with the checkpoint to run.
        tf32: let CUDA round the factors of fp32 matrix products to TF32. Holds for the whole process; where the
            weights lie elsewhere, a `UserWarning` says that it has no effect.
        quantization_config: transformers' configuration, for weights to be quantised while loading. Weights that are
            stored quantised need none.
        revision: branch, tag or commit of a Hugging Face id.
        prepack: on CPUs, keep a second copy of the weights in the kernels' own layout, if half of the free memory holds
            it: the same products, faster (`specdiff.models.prepacked`).

    Returns:
        The target (its ``info`` records dtype, device, attention, TF32 and quantisation) and the tokenizer.

    Raises:
        InputError: an option is unknown, or two exclude each other.
        CheckpointError: files are missing, damaged or of a refused kind. DownloadError: an id could not be fetched.
        UnsupportedModelError: the model cannot be a target, and why.
    """
    source = str(path_or_id)
    _check_options(device=device, device_map=device_map, tp_plan=tp_plan, attention=attn_implementation)
    options: dict[str, Any] = {"dtype": dtype_of(dtype) if dtype != "auto" else "auto"}
    is_folder = _check_source(source, trust_remote_code)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    options |= _placement(device, device_map, tp_plan)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        origin["revision"] = revision
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, **options, **origin
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
    except Exception as error:
        raise _explained(error, source, is_folder) from error
    _check_complete(report, source)
    if flag("prepack", prepack, remedy="say whether to keep packed copies of the weights"):
        prepack_layers(model)
    target = CausalTarget(model, name=Path(source).name)
    if tf32 and not target.info.tf32:
        warnings.warn(f"tf32 has no effect: {target.name!r} is not on a CUDA device", stacklevel=2)
    target.self_check()
    return target, tokenizer


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype called ``bf16``, ``fp16`` or ``fp32`` (a torch dtype is returned as it is).

    Raises:
        InputError: there is no such dtype.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise InputError.of(
            "dtype", expected="one of " + ", ".join(_DTYPES), got=name, remedy="use one of these, or 'auto'"
        )
    return _DTYPES[name]


def _check_options(*, device: Any, device_map: Any, tp_plan: Any, attention: str | None) -> None:
    given = [n for n, v in (("device", device), ("device_map", device_map), ("tp_plan", tp_plan)) if v is not None]
    if len(given) > 1:
        raise InputError.of(
            given[1], expected=f"None beside {given[0]}", got=given, remedy="choose one way to place weights"
        )
    if tp_plan is not None and "WORLD_SIZE" not in os.environ:
        raise InputError.of(
            "tp_plan", expected="a run under torchrun", got=tp_plan, remedy="start with torchrun --nproc-per-node=N"
        )
    if attention not in (None, "sdpa", "eager"):
        raise InputError.of(
            "attn_implementation",
            expected="'sdpa' or 'eager', which take the 4-D masks that token trees need",
            got=attention,
            remedy="leave it out",
        )


def _check_source(source: str, trust_remote_code: bool) -> bool:
    """Whether the source is a folder (then checked) rather than an id."""
    if Path(source).is_dir():
        check_folder(Path(source), allow_remote_code=trust_remote_code)
        return True
    if Path(source).exists() or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"target: {source!r} is no model folder; check the path, or give a Hugging Face id")
    return False


def _placement(device: Any, device_map: Any, tp_plan: Any) -> dict[str, Any]:
    if tp_plan is not None:
        return {"distributed_config": DistributedConfig(tp_plan=tp_plan)}
    if device_map is not None:
        return {"device_map": device_map}
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise InputError.of("device", expected="one that torch sees here", got=str(device), remedy="use device 'cpu'")
    # also for the CPU: quantised weights are placed while loading, they cannot be moved afterwards
    return {"device_map": {"": device}}


def _explained(error: Exception, source: str, is_folder: bool) -> ModelError | DownloadError:
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return ModelError(f"target: no memory to load {source!r} ({error}); use a smaller dtype or device_map='auto'")
    if isinstance(error, ImportError):
        return UnsupportedModelError(f"target: {source!r} needs a package that is not installed: {error}")
    if isinstance(error, SafetensorError):
        return CheckpointError(f"target: weights of {source!r} are damaged ({error}); fetch the model again")
    if isinstance(error, OSError) and not is_folder:
        return DownloadError(f"target: {source!r} is neither a folder here nor a model that could be fetched: {error}")
    return CheckpointError(f"target: {source!r} cannot be loaded: {error}")


def _check_complete(report: dict[str, Any], source: str) -> None:
    """Refuse a checkpoint that lacks tensors: transformers would fill them with random numbers and only warn."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(f"target: {source!r} lacks {len(missing)} tensors ({shown}); fetch the model again")
