"""Reading and writing checkpoint folders: JSON and safetensors, nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdiff.errors import CheckpointError
from specdiff.hub.safety import PICKLE_SUFFIXES, read_json

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file counts as an empty one."""
    return read_json(path) if path.is_file() else {}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        CheckpointError: there are none (pickles are refused), or one that the index lists is missing.
    """
    index = directory / _INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        if not names:
            raise CheckpointError(f"{index}: has no weight_map; fetch the file again")
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index}: lists {name!r}, which is no safetensors file of this folder")
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name}: missing, but the index lists it; fetch the model again")
        return [directory / name for name in names]
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    raise no_safetensors(directory, WEIGHTS_NAME)


def no_safetensors(directory: Path, name: str) -> CheckpointError:
    """The error for a folder without ``name``; says whether a pickle is there in its place."""
    names = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    pickle = next((n for n in names if n.endswith(PICKLE_SUFFIXES)), None)
    if pickle is not None:
        return CheckpointError(
            f"{directory / pickle}: weights in pickle format are refused, since loading them can run any code; convert "
            "them to safetensors, or fetch the safetensors version of the model"
        )
    return CheckpointError(f"{directory / name}: missing; fetch the model again")


def tensors_of(path: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one safetensors file, read one at a time.

    Raises:
        CheckpointError: the file is truncated or no safetensors file.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a sound safetensors file ({error}); fetch it again") from error


def write_folder(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write weights, then configuration; each under a temporary name that is renamed, so no reader sees half a file.

    Args:
        directory: created if needed.
        config: a JSON object.
        tensors: published names and tensors, on any device.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / f".{WEIGHTS_NAME}.{os.getpid()}"
    text = directory / f".{CONFIG_NAME}.{os.getpid()}"
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, weights, {"format": "pt"})
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights.replace(directory / WEIGHTS_NAME)
        text.replace(directory / CONFIG_NAME)
    finally:
        weights.unlink(missing_ok=True)
        text.unlink(missing_ok=True)
