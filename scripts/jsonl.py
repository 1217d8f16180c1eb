"""Prompts and results as JSON lines, shared by the scripts that can be stopped and go on."""

from __future__ import annotations

import json
from pathlib import Path


def prompts(path: str, first: int, last: int) -> list[tuple[str, str]]:
    """(id, prompt) of rows ``first`` to ``last`` - 1 of a file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[first:last]
    return [(str(row["id"]), row["prompt"]) for row in map(json.loads, lines)]


def rows(path: Path) -> list[dict]:
    """What is in a file so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(path: Path, row: dict) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
