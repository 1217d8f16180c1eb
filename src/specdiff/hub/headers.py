"""Structural check of one safetensors file: header and file size only, no tensor data is read.

At least as strict as the safetensors library: a file that passes here is one it opens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from specdiff.errors import CheckpointError

_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_COUNT = 1 << 63
_MAX_RANK = 64  # torch's own limit
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def check_safetensors(path: Path) -> tuple[str, ...]:
    """Check one file and return the names of its tensors, in the order of their data.

    Raises:
        CheckpointError: the file is unreadable, truncated, longer than its header says, or its header is malformed.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                _refuse(path, f"truncated: {size} bytes, not even a header length")
            if not 2 <= length <= _MAX_HEADER:
                _refuse(path, f"header length {length} is impossible")
            if 8 + length > size:
                _refuse(path, f"truncated: {size} bytes, the header alone ends at {8 + length}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not raw.startswith(b"{"):
        _refuse(path, "the header is not a JSON object")
    return _check_header(path, _parse(path, raw), size - 8 - length)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(
        f"{path}: not a sound safetensors file ({reason}); remove the file and fetch it again "
        "(catalog models: `specdiff models pull --force NAME`)"
    )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key occurs twice")
        for key, value in pairs:  # a lone surrogate is JSON to Python but not to the safetensors library
            key.encode()
            if isinstance(value, str):
                value.encode()
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        _refuse(path, f"the header is not valid JSON: {error}")
    return header


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT for value in values
    )


def _num_elements(shape: list[int]) -> int:
    """Product of the dimensions, -1 where a partial product overflows (a later 0 does not excuse it)."""
    product = 1
    for size in shape:
        product *= size
        if product >= _MAX_COUNT:
            return -1
    return product


def _check_header(path: Path, header: dict[str, Any], data_size: int) -> tuple[str, ...]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "__metadata__ is not a table of strings")
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            _refuse(path, f"entry {name!r} is not dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            _refuse(path, f"tensor {name!r} has unknown dtype {dtype!r}")
        if not _are_counts(shape) or len(shape) > _MAX_RANK:
            _refuse(path, f"tensor {name!r} has a malformed shape")
        if not _are_counts(offsets) or len(offsets) != 2:
            _refuse(path, f"tensor {name!r} has malformed data offsets")
        begin, end = offsets
        if end < begin or end - begin != _num_elements(shape) * _BITS[dtype] // 8:
            _refuse(path, f"tensor {name!r}: offsets {offsets} do not fit {dtype} {shape}")
        spans.append((begin, end, name))
    spans.sort()
    position = 0
    for begin, end, name in spans:
        if begin != position:
            _refuse(path, f"tensor {name!r} starts at {begin}, expected {position}")
        position = end
    if position != data_size:
        kind = "truncated" if position > data_size else "longer than its header says"
        _refuse(path, f"{kind}: {data_size} bytes of data, the header describes {position}")
    return tuple(name for _, _, name in spans)
