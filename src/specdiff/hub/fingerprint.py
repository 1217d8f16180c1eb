"""Identity of a model folder: what its configuration and weights hash to.

Two folders have one fingerprint exactly where a target computes the same thing: the same configuration and the same
weight files, whatever the folder is called. A dequantised copy carries the key ``specdiff_origin`` in its
configuration, so its fingerprint differs from the original's by construction, even if every weight came out equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from specdiff.errors import CheckpointError

_CHUNK = 1 << 20
_INCIDENTAL = ("transformers_version", "_name_or_path", "_model_name_or_path")  # vary without changing the model


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file as hex; ``on_bytes`` is told the size of every chunk read.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def model_fingerprint(folder: Path, hashes: Mapping[str, str] | None = None) -> str:
    """Return the fingerprint of a model folder, ``sha256:`` and 64 hex digits.

    Args:
        folder: with ``config.json`` and ``*.safetensors``.
        hashes: SHA-256 by file name, where already known; files not named are read and hashed.

    Raises:
        CheckpointError: no readable configuration, or no safetensors.
    """
    known = hashes or {}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = sorted(known.get(path.name) or sha256_file(path) for path in folder.glob("*.safetensors"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: no fingerprint, a file is missing or unreadable ({error})") from error
    if not weights or not isinstance(config, dict):
        raise CheckpointError(f"{folder}: no fingerprint, expected config.json and *.safetensors; pull the model again")
    config = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    text = json.dumps({"config": config, "weights": weights}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
