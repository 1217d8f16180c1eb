"""What can be wrong with a corpus: typed errors that name the file and the line.

::

    InputError
    └── CorpusError               a corpus cannot be used or continued, and why
        └── BrokenRowError        one line is not a row: file, line number, kind
    SpecdiffError
    ├── CorpusWriteError (also OSError)    a row could not be written; all committed rows are kept
    └── WorkerError (also RuntimeError)    a worker process died; all committed rows are kept
"""

from __future__ import annotations

import enum
from pathlib import Path

from specdiff.errors import InputError, SpecdiffError


class Broken(enum.StrEnum):
    """Why a line is not a row."""

    UNREADABLE = "unreadable file"
    ENCODING = "not UTF-8"
    BOM = "byte-order mark"
    BLANK = "blank line"
    TRUNCATED = "truncated line"
    NOT_JSON = "not JSON"
    NOT_OBJECT = "not an object"
    REPEATED_FIELD = "repeated field"
    MISSING_FIELD = "missing field"
    WRONG_TYPE = "wrong type"
    EMPTY_NAME = "empty id"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_ANSWER = "empty answer"
    NEGATIVE_ID = "negative token id"
    UNKNOWN_ID = "token id beyond the vocabulary"
    NOT_FINITE = "log-probability not finite"
    POSITIVE_LOGPROB = "log-probability above zero"
    LENGTHS_DIFFER = "lengths differ"
    FINISH = "wrong finish reason"
    DUPLICATE = "duplicate key"


class CorpusError(InputError):
    """A corpus cannot be used or continued; the message says why and what to do."""


class BrokenRowError(CorpusError):
    """A line is not what it should be.

    Attributes:
        path: the file. line: its number, from 1; 0 for the file as a whole. kind: see `Broken`.
    """

    def __init__(self, path: Path, line: int, kind: Broken, message: str) -> None:
        where = f"{path}, line {line}" if line else str(path)
        super().__init__(f"{where}: {kind.value}: {message}")
        self.path, self.line, self.kind, self.reason = path, line, kind, message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.line, self.kind, self.reason)


class CorpusWriteError(SpecdiffError, OSError):
    """Rows could not be written (disk full, ...); what was committed before is whole, and the run can be repeated."""


class WorkerError(SpecdiffError, RuntimeError):
    """A worker process ended before its work did; what it committed is whole, and the run can be repeated."""
