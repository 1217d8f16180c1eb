"""Prompts by group: data sets, or the categories of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from specdiff.checking import integer
from specdiff.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """What is asked.

    Attributes:
        id: unique. group: data set or category, of the field ``task``, else the file's name. text: the first turn.
    """

    id: str
    group: str
    text: str


def read_tasks(paths: Sequence[Path], limit: int | None = None) -> list[TaskPrompt]:
    """Prompts of JSON lines with ``prompt``, and ``id`` and ``task`` where they have them.

    Args:
        paths: the files. limit: most prompts in all, taken from the groups in turns.

    Raises:
        InputError: no file, a broken line, two prompts of one id, or no prompt.
    """
    if not paths:
        raise InputError.of("--prompts", expected="a file of prompts", got=None, remedy="give JSON lines with 'prompt'")
    if limit is not None:
        integer("--limit", limit, 1, remedy="leave it out for all")
    groups: dict[str, list[TaskPrompt]] = {}
    seen: set[str] = set()
    for path in paths:
        if not path.is_file():
            raise InputError.of("--prompts", expected="a readable file", got=str(path), remedy="check the path")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            prompt = _prompt(line, path, number)
            if prompt.id in seen:
                raise InputError.of(
                    f"{path.name} line {number}", expected="ids that differ", got=prompt.id, remedy="rename one"
                )
            seen.add(prompt.id)
            groups.setdefault(prompt.group, []).append(prompt)
    chosen = list(_in_turns(groups.values()))[:limit]
    if not chosen:
        raise InputError.of("--prompts", expected="at least one prompt", got="none", remedy="check the files")
    return chosen


def _in_turns(columns: Iterable[list[TaskPrompt]]) -> Iterable[TaskPrompt]:
    for turn in zip_longest(*columns):
        yield from (prompt for prompt in turn if prompt is not None)


def _prompt(line: str, path: Path, number: int) -> TaskPrompt:
    try:
        item = json.loads(line)
        text, name, group = item["prompt"], item.get("id", f"{path.stem}/{number}"), item.get("task", path.stem)
        if not isinstance(text, str) or not text.strip():
            raise TypeError(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError.of(
            f"{path.name} line {number}", expected="a JSON object with a text 'prompt'", got=line[:80],
            remedy="fix or remove the line",
        ) from error  # fmt: skip
    return TaskPrompt(id=str(name), group=str(group), text=text)
