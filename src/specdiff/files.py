"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name beside it, then rename it: a reader sees all of it or the old one.

    Args:
        path: the file. write: called with the temporary path; if it raises, nothing of it is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file with `write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
