"""What a model folder must satisfy before anything in it is loaded.

Loading a checkpoint must not run code from it: no pickle, no remote code, no kernels from a hub. And it must be whole:
what a cut-off download or a flipped bit left behind is refused here, with the file's name, not met later as garbage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdiff.errors import CheckpointError
from specdiff.hub.headers import check_safetensors

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx")


def check_folder(folder: Path, *, allow_remote_code: bool = False) -> tuple[Path, ...]:
    """Check a model folder and return its weight files.

    Args:
        folder: with ``config.json`` and safetensors, whole or in shards.
        allow_remote_code: accept a configuration that asks for Python code of its own. Loading it runs that code.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, the weights are pickle, or code would be run.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a model folder, but it is not one; check the path")
    config = read_json(folder / "config.json")
    if "model_type" not in config and "architectures" not in config:
        raise CheckpointError(f"{folder / 'config.json'}: names no model_type; it is not a model configuration")
    if not allow_remote_code:
        check_no_code(folder)
    return check_weights(folder)


def check_weights(folder: Path) -> tuple[Path, ...]:
    """Check the weights of a folder: safetensors only, each sound, no shard and no tensor missing.

    Raises:
        CheckpointError: there are none, they are pickle, or one is missing, truncated or malformed.
    """
    files = tuple(sorted(folder.glob("*.safetensors")))
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not files and not indices:
        raise CheckpointError(_no_safetensors(folder))
    tensors = {path.name: frozenset(check_safetensors(path)) for path in files}
    for index in indices:
        _check_index(index, tensors)
    return files


def check_no_code(folder: Path) -> None:
    """Refuse a folder whose configuration would have Python code loaded from it or from a hub.

    Raises:
        CheckpointError: naming the file and the key.
    """
    for path in sorted(folder.glob("*config.json")):
        for key, value in _walk(read_json(path)):
            if key == "auto_map" and value:
                raise CheckpointError(
                    f"{path}: wants its own Python code run (auto_map); refused. Read that code first, then allow it "
                    "explicitly with trust_remote_code=True, or use a model that transformers supports itself"
                )
            if key.strip("_").removesuffix("_internal").endswith("_implementation") and "/" in json.dumps(value):
                raise CheckpointError(
                    f"{path}: wants a compiled kernel fetched from a hub ({key}: {value!r}); refused. Remove the key"
                )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; the folder is not a complete model, fetch it again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; fetch the file again")
    return value


def _walk(value: object) -> Iterator[tuple[str, object]]:
    """Every (key, value) of nested objects; multi-part models nest one configuration in another."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from node.items()
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _no_safetensors(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{folder / pickles[0]}: weights in pickle format are refused, loading them can run any code; convert them "
            "to safetensors (save_pretrained writes that), or fetch the safetensors version of the model"
        )
    others = [name for name in names if name.endswith(_OTHER_SUFFIXES)]
    if others:
        return f"{folder / others[0]}: this weight format is not read; convert it to safetensors"
    return f"{folder}: no *.safetensors in it; fetch the model again"


def _check_index(index: Path, tensors: dict[str, frozenset[str]]) -> None:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; fetch the file again")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{index}: {tensor!r} is mapped to {shard!r}, which is no file of this folder")
        if shard not in tensors:
            raise CheckpointError(f"{index.parent / shard}: missing, but the index lists it; fetch the model again")
        if tensor not in tensors[shard]:
            raise CheckpointError(f"{index.parent / shard}: lacks tensor {tensor!r}; fetch the model again")
