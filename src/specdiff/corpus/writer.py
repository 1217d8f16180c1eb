"""How rows get to the disk: appended whole, synced, and whatever a crash left behind cut off.

A row is committed once its line, newline included, is synced. A killed process can leave at most one unfinished line at
the end of the one file that it alone writes; `repair_tail` cuts it off before the next row is appended. A failed write
(disk full) is taken back at once. So a file is always a sequence of whole rows, plus at most the beginning of one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from specdiff.corpus.problems import CorpusWriteError

_CHUNK = 1 << 16


class RowWriter:
    """Appends rows to one file, which no other process may write to meanwhile.

    Args:
        path: the file; made if it is not there, repaired if its last line is unfinished.

    Raises:
        CorpusWriteError: the file cannot be opened or repaired.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fresh = not path.exists()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if fresh:
                sync_folder(path.parent)
            self._end = _cut_tail(self._file)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, lines: Sequence[bytes]) -> None:
        """Commit lines: when this returns, they survive a crash.

        Raises:
            CorpusWriteError: they could not be written; none of them is in the file then.
        """
        data = b"".join(lines)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise _failed(self.path, error) from error
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def repair_tail(path: Path) -> None:
    """Cut off an unfinished last line.

    Raises:
        CorpusWriteError: the file cannot be repaired.
    """
    try:
        file = os.open(path, os.O_RDWR)
        try:
            _cut_tail(file)
        finally:
            os.close(file)
    except OSError as error:
        raise _failed(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a crash."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _cut_tail(file: int) -> int:
    """Cut an unfinished last line off; return the length of what is left.

    A last line that ends in a newline but is no JSON is cut off too: after a power cut, the file's length can reach the
    disk before its contents do.
    """
    size = os.fstat(file).st_size
    end = _line_end(file, size)
    start = _line_end(file, end - 1) if end else 0
    if end and not _is_json(os.pread(file, end - start, start)):
        end = start
    if end != size:
        os.ftruncate(file, end)
        os.fsync(file)
    return end


def _line_end(file: int, before: int) -> int:
    """Offset behind the last newline among the first ``before`` bytes, 0 if there is none."""
    end = max(before, 0)
    while end:
        start = max(0, end - _CHUNK)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _failed(path: Path, error: OSError) -> CorpusWriteError:
    return CorpusWriteError(
        f"{path}: cannot be written ({error.strerror or error}); every row committed before is whole: make room or "
        "permit writing, then run the same command again"
    )
