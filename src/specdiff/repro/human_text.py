"""Rows of text that people wrote, for drafters that were never aligned to a target: the training-free setting.

References of data sets (questions and the answers that came with them) and modules of Python's standard library. The
target's own answers are not among them. The rows have the form that `specdiff.train.windows.read_rows` reads.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdiff.chat import chat_ids
from specdiff.checking import integer
from specdiff.errors import InputError
from specdiff.files import write_text

_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class HumanRow:
    """One text in token ids.

    Attributes:
        id: its name. prompt_ids: what comes before. ids: what a person wrote then.
    """

    id: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As a line of the row file."""
        return {"id": self.id, "prompt_ids": list(self.prompt_ids), "ids": list(self.ids)}


def reference_rows(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, split: str | None = None, exclude_from: Sequence[str] = ()
) -> Iterator[HumanRow]:
    """Prompts and references of a file of JSON lines with ``id``, ``prompt`` and ``reference``.

    Args:
        path: the file. tokenizer: the target's; prompts go into its chat template where it has one, and EOS ends a row.
        split: keep only lines whose ``split`` is this; lines without the field are kept.
        exclude_from: ``PREFIX/NUMBER``: leave out ids PREFIX/n with n >= NUMBER.

    Raises:
        InputError: the file cannot be read, or a line has no text for one of the fields.
    """
    if not path.is_file():
        raise InputError.of("--source", expected="a readable file", got=str(path), remedy="check the path")
    rules = [_rule(text) for text in exclude_from]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            name, prompt, reference = item["id"], item["prompt"], item["reference"]
            if not all(isinstance(x, str) and x for x in (name, prompt, reference)):
                raise TypeError(line[:40])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError.of(
                f"{path.name} line {number}", expected="an object with texts id, prompt and reference", got=line[:80],
                remedy="fix or remove the line",
            ) from error  # fmt: skip
        if (split is not None and item.get("split", split) != split) or any(_falls(name, rule) for rule in rules):
            continue
        ids = [*_plain_ids(tokenizer, reference), *_end(tokenizer)]
        yield HumanRow(id=name, prompt_ids=tuple(_prompt_ids(tokenizer, prompt)), ids=tuple(ids))


def library_rows(
    tokenizer: PreTrainedTokenizerBase, *, folder: Path | None = None, length: int = 256, limit: int | None = None
) -> Iterator[HumanRow]:
    """Pieces of the Python modules of a folder, in the order of their names.

    Args:
        tokenizer: the target's. folder: None = this Python's standard library, without its tests.
        length: tokens of a piece; the first 16th, at least one token, is what comes before.
        limit: most pieces, spread evenly over all there are.

    Raises:
        InputError: a length below 2, or a limit below 1.
    """
    integer("length", length, 2, remedy="try 256")
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts))
    if limit is not None:
        integer("limit", limit, 1, remedy="leave it out for all")
        # each module gives at least a piece, so that no more modules are read than pieces are wanted
        paths = [paths[i * len(paths) // limit] for i in range(limit)] if limit < len(paths) else paths
    pieces = [piece for path in paths for piece in _pieces(path, root, tokenizer, length)]
    count = len(pieces) if limit is None else min(limit, len(pieces))
    yield from (pieces[i * len(pieces) // count] for i in range(count))


def _pieces(path: Path, root: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[HumanRow]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # a handful of old modules
        return
    ids = _plain_ids(tokenizer, text)
    before = max(1, length // 16)
    for start in range(0, len(ids), length):
        piece = ids[start : start + length]
        if len(piece) > before:
            name = f"library/{path.relative_to(root).as_posix()}/{start}"
            yield HumanRow(id=name, prompt_ids=tuple(piece[:before]), ids=tuple(piece[before:]))


def write_rows(path: Path, rows: Iterable[HumanRow]) -> int:
    """Write a row file, whole or not at all.

    Returns:
        How many rows.

    Raises:
        InputError: there is none.
    """
    lines = [json.dumps(row.to_json(), separators=(",", ":")) for row in rows]
    if not lines:
        raise InputError.of("sources", expected="at least one row", got=0, remedy="give --source files or --library")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")
    return len(lines)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        return chat_ids(tokenizer, prompt)
    return _plain_ids(tokenizer, prompt)


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose: a module may be longer than the model's context; it is cut into pieces
    encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"])


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos: Any = tokenizer.eos_token_id
    return [] if eos is None else [int(eos)]


def _rule(text: str) -> tuple[str, int]:
    prefix, _, first = text.rpartition("/")
    if not prefix or not first.isdigit():
        raise InputError.of("--exclude-from", expected="PREFIX/NUMBER", got=text, remedy="such as gsm8k/train/7073")
    return prefix, int(first)


def _falls(name: str, rule: tuple[str, int]) -> bool:
    prefix, _, number = name.rpartition("/")
    return prefix == rule[0] and number.isdigit() and int(number) >= rule[1]
