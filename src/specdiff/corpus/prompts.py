"""Prompts from JSON lines or from data sets: a name and a text (or chat messages) each, in a fixed order."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdiff.checking import integer
from specdiff.corpus.problems import Broken, BrokenRowError, CorpusError

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked.

    Attributes:
        id: name, unique among the prompts of a corpus.
        content: a text, or chat messages (``role``, ``content``).
    """

    id: str
    content: str | Messages


@dataclass(frozen=True, kw_only=True)
class DatasetPart:
    """Prompts of one data set.

    Attributes:
        dataset: its name on the Hugging Face hub, or the name of a builder of `datasets` (``json``) with `data_files`.
        config, split: as for ``datasets.load_dataset``.
        fields: names of the fields that make up the prompt: their texts, those that are not empty, with a blank line
            in between; or one field with chat messages.
        id_field: name of the field that names a prompt, None = its number. Rows whose name came before are skipped, so
            that sets with several rows a prompt give each prompt once.
        data_files: for a builder.
        label: names the part in ids and records.
    """

    dataset: str
    fields: tuple[str, ...]
    label: str
    config: str | None = None
    split: str = "train"
    id_field: str | None = None
    data_files: tuple[str, ...] = ()


def read_jsonl(path: Path, *, field: str = "prompt", id_field: str = "id") -> Iterator[Prompt]:
    """Prompts of a file of JSON objects, one a line; blank lines are skipped.

    Args:
        path: the file. field: holds a text or a list of chat messages. id_field: holds the name (text or integer);
            where a line has no such field, the file's name and the line's number are the name.

    Raises:
        BrokenRowError: a line is none, and why. CorpusError: the file cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _prompt(_fields(line, path, number), path, number, field, id_field)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def stream_part(part: DatasetPart, load: Callable[..., Iterable[Mapping[str, Any]]] | None = None) -> Iterator[Prompt]:
    """Prompts of a data set, streamed: nothing but the rows that are looked at is fetched.

    Args:
        part: which. load: in place of ``datasets.load_dataset``.

    Raises:
        CorpusError: `datasets` is not installed, the set cannot be loaded, or lacks a field.
    """
    options: dict[str, Any] = {"split": part.split, "streaming": True}
    if part.data_files:
        options["data_files"] = list(part.data_files)
    try:
        rows = (load or _load_dataset())(part.dataset, part.config, **options)
        wanted = [*part.fields, *([part.id_field] if part.id_field else [])]
        if hasattr(rows, "select_columns"):
            rows = rows.select_columns(wanted)  # pyright: ignore[reportAttributeAccessIssue]
        seen: set[str] = set()
        for number, row in enumerate(rows):
            missing = [name for name in wanted if name not in row]
            if missing:
                raise CorpusError(f"{part.dataset}: expected the fields {wanted}, got {sorted(row)}; check the names")
            name = str(row[part.id_field]) if part.id_field else str(number)
            content = _content([row[name] for name in part.fields])
            if content is None:
                raise CorpusError(f"{part.dataset}, row {number}: expected text or messages in {part.fields}")
            if name not in seen and content:
                seen.add(name)
                yield Prompt(id=f"{part.label}/{name}", content=content)
    except CorpusError:
        raise
    except Exception as error:  # whatever a data set's own loader raises
        raise CorpusError(
            f"{part.dataset}: cannot be streamed ({error!r}); check name, config, split and network"
        ) from (error)


def take(prompts: Iterable[Prompt], *, skip: int = 0, limit: int | None = None) -> list[Prompt]:
    """The prompts after the first ``skip``, at most ``limit``; reads no further than that.

    Raises:
        CorpusError: none are left, or two have one name.
    """
    integer("skip", skip, 0, remedy="0 skips none")
    if limit is not None:
        integer("limit", limit, 1, remedy="leave it out for all")
    taken = list(itertools.islice(prompts, skip, None if limit is None else skip + limit))
    if not taken:
        raise CorpusError(f"prompts: expected at least one after the first {skip}, got none; check the source")
    names: set[str] = set()
    for prompt in taken:
        if prompt.id in names:
            raise CorpusError(f"prompts: expected names that differ, got {prompt.id!r} twice; rename or drop one")
        names.add(prompt.id)
    return taken


def take_shares(parts: Iterable[Iterable[Prompt]], limit: int) -> list[Prompt]:
    """As near as can be the same number of prompts from each part, ``limit`` in all, in turns.

    Raises:
        CorpusError: a part has too few.
    """
    sources = list(parts)
    counts = [limit // len(sources) + (i < limit % len(sources)) for i in range(len(sources))]
    columns = [list(itertools.islice(source, count)) for source, count in zip(sources, counts, strict=True)]
    for number, (column, count) in enumerate(zip(columns, counts, strict=True), start=1):
        if len(column) < count:
            raise CorpusError(f"prompts: part {number} has {len(column)}, expected {count}; use a smaller --limit")
    turns = itertools.zip_longest(*columns)
    return take(prompt for turn in turns for prompt in turn if prompt is not None)


def file_source(path: Path, *, field: str, id_field: str, skip: int, limit: int | None) -> dict[str, Any]:
    """How a manifest describes prompts of a file: its name and hash, not where it lies."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "kind": "jsonl", "file": path.name, "sha256": digest, "field": field, "id_field": id_field, "skip": skip,
        "limit": limit,
    }  # fmt: skip


def dataset_source(parts: Iterable[DatasetPart], *, skip: int, limit: int | None) -> dict[str, Any]:
    """How a manifest describes prompts of data sets."""
    return {"kind": "datasets", "parts": [asdict(part) for part in parts], "skip": skip, "limit": limit}


def _load_dataset() -> Callable[..., Any]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CorpusError("data sets need the package `datasets`; install specdiff[datasets], or use a file") from error
    return load_dataset


def _fields(line: bytes, path: Path, number: int) -> dict[str, Any]:
    if line.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise BrokenRowError(path, number, Broken.BOM, "expected UTF-8 without a byte-order mark")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BrokenRowError(path, number, Broken.ENCODING, f"byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise BrokenRowError(path, number, Broken.NOT_JSON, f"{error}, got {line[:60]!r}") from error
    if not isinstance(value, dict):
        raise BrokenRowError(path, number, Broken.NOT_OBJECT, f"expected an object, got {type(value).__name__}")
    return value


def _prompt(item: dict[str, Any], path: Path, number: int, field: str, id_field: str) -> Prompt:
    if field not in item:
        raise BrokenRowError(
            path, number, Broken.MISSING_FIELD, f"expected {field!r}, got {sorted(item)}; name another with --field"
        )
    content = _content([item[field]])
    if content is None:
        raise BrokenRowError(path, number, Broken.WRONG_TYPE, f"{field}: expected a text or chat messages")
    if not content:
        raise BrokenRowError(path, number, Broken.EMPTY_PROMPT, f"{field}: expected a text, got nothing")
    name = item.get(id_field, f"{path.stem}/{number}")
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise BrokenRowError(path, number, Broken.WRONG_TYPE, f"{id_field}: expected a name, got {name!r:.60}")
    return Prompt(id=str(name), content=content)


def _content(values: list[Any]) -> str | Messages | None:
    """A prompt's text or messages ("" or () where there is none), None where the values are neither."""
    if all(value is None or isinstance(value, str) for value in values):
        return "\n\n".join(value for value in values if value and value.strip())
    if len(values) == 1 and isinstance(values[0], list):
        messages = values[0]
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
               for m in messages):  # fmt: skip
            return tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return None
