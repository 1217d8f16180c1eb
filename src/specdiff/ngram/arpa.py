r"""ARPA files with token ids as words: written whole or not at all, read back with every line checked.

The format is that of SRILM's ``ngram-format(5)`` page: ``\data\`` with the number of n-grams of each length, then the
n-grams with decimal logarithms of probability and back-off weight, then ``\end\``. A word is a token id in decimal, or
``<s>``, ``</s>``, ``<unk>``. Lines before ``\data\`` that begin with ``#`` are comments, to KenLM too; one of them is
ours and says what the ids mean: ``# specdiff-ngram {"schema": 1, "order": 3, "tokenizer_fingerprint": ...}``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from specdiff.errors import CheckpointError, InputError, PairingError
from specdiff.files import write_atomically
from specdiff.ngram.base import BOS, EOS, UNK
from specdiff.ngram.table import Floats, Ids, NgramTable

_MARK, _SCHEMA = "# specdiff-ngram ", 1
_LN10 = math.log(10.0)
_SPECIAL = {"<s>": BOS, "</s>": EOS, "<unk>": UNK}
_NAMES = {index: word for word, index in _SPECIAL.items()}
_COUNT = re.compile(r"ngram\s+(\d+)\s*=\s*(\d+)")
_CHUNK = 1 << 16  # lines formatted at once
_LARGEST = 2**31 - 1


class ArpaError(CheckpointError):
    """A file is not a sound ARPA file of token ids.

    Attributes:
        path: the file. line: number of the line, from 1; 0 for the file as a whole.
    """

    def __init__(self, path: Path, line: int, message: str) -> None:
        super().__init__(f"{path}, line {line}: {message}" if line else f"{path}: {message}")
        self.path, self.line, self.reason = path, line, message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.line, self.reason)


@dataclass(frozen=True, kw_only=True)
class ArpaHeader:
    """What a file says of itself.

    Attributes:
        order: longest n-gram. counts: n-grams of each length, the shortest first.
        tokenizer_fingerprint: whose ids the words are (`specdiff.corpus.identity.tokenizer_fingerprint`), "" = unknown.
        sequences, tokens: it was estimated from; 0 = unknown.
        discounts: D_1, D_2, D_3 of each length (see `specdiff.ngram.kneser_ney`), empty = unknown.
        fallback: lengths whose discounts are the fallback.
        source: what was read, by name.
    """

    order: int
    counts: tuple[int, ...]
    tokenizer_fingerprint: str = ""
    sequences: int = 0
    tokens: int = 0
    discounts: tuple[tuple[float, float, float], ...] = ()
    fallback: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """Plain data, as stored."""
        return {"schema": _SCHEMA, **json.loads(json.dumps(asdict(self)))}


def write_arpa(path: Path, table: NgramTable, header: ArpaHeader) -> None:
    """Write a model atomically, with 9 significant digits a number (all of a float32's).

    Args:
        path: the file, replaced if there. table: the model. header: goes into the comment.

    Raises:
        InputError: header and table differ in their counts, or the file cannot be written.
    """
    if header.counts != table.counts or header.order != table.order:
        raise InputError.of("header", expected=f"counts {table.counts}", got=header.counts, remedy="make it anew")

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="ascii", newline="\n") as file:
            file.write(_MARK + json.dumps(header.to_json()) + "\n\\data\\\n")
            file.writelines(f"ngram {n}={count}\n" for n, count in enumerate(table.counts, start=1))
            for n in range(1, table.order + 1):
                file.write(f"\n\\{n}-grams:\n")
                _write_section(file, table, n)
            file.write("\n\\end\\\n")

    try:
        write_atomically(path, write)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or error}); choose another place, or make room"
        ) from error


def _write_section(file: TextIO, table: NgramTable, n: int) -> None:
    grams, log_probs = table.grams[n - 1], table.log_probs[n - 1]
    backoffs = table.backoffs[n - 1] if n < table.order else None
    for low in range(0, len(grams), _CHUNK):
        part = slice(low, low + _CHUNK)
        words = [" ".join([_NAMES.get(i) or str(i) for i in gram]) for gram in grams[part].tolist()]
        values = (log_probs[part] / _LN10).tolist()
        if backoffs is None:
            lines = [f"{value:.9g}\t{text}\n" for value, text in zip(values, words, strict=True)]
        else:
            weights = (backoffs[part] / _LN10 + 0.0).tolist()  # + 0.0: no "-0"
            lines = [f"{p:.9g}\t{text}\t{b:.9g}\n" for p, text, b in zip(values, words, weights, strict=True)]
        file.writelines(lines)


def read_header(path: Path, *, tokenizer_fingerprint: str | None = None) -> ArpaHeader:
    """Read what a file says of itself, and nothing further.

    Args:
        path: the file. tokenizer_fingerprint: the tokenizer whose ids it must hold, None = any.

    Raises:
        ArpaError: it is no ARPA file. PairingError: it holds ids of another tokenizer, or does not say of which.
    """
    with _reading(path) as lines:
        return _checked(lines.header(), path, tokenizer_fingerprint)


def read_arpa(path: Path, *, tokenizer_fingerprint: str | None = None) -> tuple[ArpaHeader, NgramTable]:
    """Read a model.

    Args:
        path: the file. tokenizer_fingerprint: the tokenizer whose ids it must hold, None = any.

    Raises:
        ArpaError: it is not a sound ARPA file of token ids, naming the line. PairingError: as `read_header`.
    """
    with _reading(path) as lines:
        header = _checked(lines.header(), path, tokenizer_fingerprint)
        sections = [lines.section(n, count, header.order) for n, count in enumerate(header.counts, start=1)]
        lines.end()
    table = NgramTable(
        grams=tuple(grams for grams, _, _ in sections),
        log_probs=tuple(log_probs for _, log_probs, _ in sections),
        backoffs=tuple(backoffs for _, _, backoffs in sections[:-1]),
    )
    if UNK not in table.grams[0]:
        raise ArpaError(path, 0, "expected <unk> among the 1-grams, got none; estimate the model with <unk>")
    return header, table


@contextmanager
def _reading(path: Path) -> Generator[_Lines]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield _Lines(path, file)
    except OSError as error:
        raise ArpaError(path, 0, f"cannot be read ({error.strerror or error}); check the path") from error


def _checked(header: ArpaHeader, path: Path, expected: str | None) -> ArpaHeader:
    if expected is not None and header.tokenizer_fingerprint != expected:
        raise PairingError.of(
            f"{path}: tokenizer",
            expected=expected,
            got=header.tokenizer_fingerprint or "none recorded",
            remedy="train an n-gram model on this tokenizer's ids with `specdiff ngram train`",
        )
    return header


class _Lines:
    """The lines of a file, one after the other, and how many were read."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file, self._number = path, file, 0

    def _error(self, message: str, line: int | None = None) -> ArpaError:
        return ArpaError(self._path, self._number if line is None else line, message)

    def _next(self, wanted: str, *, blank: bool = False) -> str:
        """The next line, the next that is not blank unless ``blank``."""
        for line in self._file:
            self._number += 1
            stripped = line.strip()
            if stripped or blank:
                return stripped
        raise self._error(f"expected {wanted}, got the end of the file; it is truncated: make or copy it again")

    def header(self) -> ArpaHeader:
        comment: dict[str, Any] | None = None
        while (line := self._next("\\data\\")) != "\\data\\":
            if not line.startswith("#"):
                raise self._error(f"expected \\data\\, got {line[:40]!r}; this is no ARPA file, check the path")
            if line.startswith(_MARK):
                comment = self._comment(line.removeprefix(_MARK))
        counts: list[int] = []
        while line := self._next("the number of n-grams", blank=True):
            found = _COUNT.fullmatch(line)
            if found is None or int(found[1]) != len(counts) + 1:
                raise self._error(f"expected 'ngram {len(counts) + 1}=COUNT', got {line[:40]!r}; make the file again")
            counts.append(int(found[2]))
        if not counts or not counts[0]:
            raise self._error("expected at least one n-gram, got none; make the file again")
        header = ArpaHeader(order=len(counts), counts=tuple(counts))
        if comment is None:
            return header
        if comment.get("counts") != counts:
            raise self._error(
                f"expected counts {comment.get('counts')} as the comment says, got {counts}; make it again"
            )
        try:
            discounts = cast("list[tuple[float, float, float]]", [tuple(map(float, d)) for d in comment["discounts"]])
            return ArpaHeader(
                order=len(counts), counts=tuple(counts), tokenizer_fingerprint=str(comment["tokenizer_fingerprint"]),
                sequences=int(comment["sequences"]), tokens=int(comment["tokens"]), discounts=tuple(discounts),
                fallback=tuple(map(int, comment["fallback"])), source=dict(comment["source"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ArpaError(self._path, 0, f"the comment {_MARK}is damaged ({error!r}); make the file again") from error

    def _comment(self, text: str) -> dict[str, Any]:
        try:
            found: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"expected JSON after {_MARK!r}, got {text[:40]!r}; make the file again") from error
        if not isinstance(found, dict) or cast("dict[str, Any]", found).get("schema") != _SCHEMA:
            raise self._error("written by another version of specdiff; make the file again")
        return cast("dict[str, Any]", found)

    def section(self, n: int, count: int, order: int) -> tuple[Ids, Floats, Floats]:
        """The n-grams of one length: ids [count, n], natural logarithms of probability and back-off weight [count]."""
        title = f"\\{n}-grams:"
        if (line := self._next(title)) != title:
            raise self._error(f"expected {title}, got {line[:40]!r}; {self._surplus(n - 1)}")
        grams, log_probs, backoffs = np.empty((count, n), np.int32), np.empty(count), np.zeros(count)
        where = np.empty(count, np.int64)
        for i in range(count):
            line = self._next(f"{count} {n}-grams (got {i})")
            if line.startswith("\\"):
                raise self._error(f"expected {count} {n}-grams, got {i}; lines are missing: make the file again")
            fields = line.split()
            if len(fields) != n + 1 and (len(fields) != n + 2 or n == order):
                weight = "" if n == order else " and perhaps a back-off weight"
                raise self._error(f"expected a number, {n} words{weight}, got {line[:60]!r}; make the file again")
            grams[i] = [self._id(word) for word in fields[1 : n + 1]]
            log_probs[i] = self._number_of(fields[0], positive=False)
            if len(fields) == n + 2:
                backoffs[i] = self._number_of(fields[-1], positive=True)
            where[i] = self._number
        self._refuse_repeats(grams, where)
        return grams, log_probs * _LN10, backoffs * _LN10

    def end(self) -> None:
        if (line := self._next("\\end\\")) != "\\end\\":
            raise self._error(f"expected \\end\\, got {line[:40]!r}; there are more n-grams than \\data\\ says")

    @staticmethod
    def _surplus(n: int) -> str:
        return f"there are more {n}-grams than \\data\\ says" if n else "make the file again"

    def _id(self, word: str) -> int:
        if word in _SPECIAL:
            return _SPECIAL[word]
        if not (word.isascii() and word.isdecimal()) or int(word) > _LARGEST:
            raise self._error(
                f"expected token ids in decimal, <s>, </s> or <unk>, got {word[:40]!r}; this is a model of words: "
                "train one on token ids with `specdiff ngram train`"
            )
        return int(word)

    def _number_of(self, text: str, *, positive: bool) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (value > 0 and not positive):
            expected = "a finite number" if positive else "a finite logarithm of a probability (<= 0)"
            raise self._error(f"expected {expected}, got {text[:40]!r}; make the file again")
        return value

    def _refuse_repeats(self, grams: Ids, where: np.ndarray) -> None:
        rank = np.lexsort(grams.T[::-1])
        same = np.flatnonzero((grams[rank[1:]] == grams[rank[:-1]]).all(axis=1))
        if same.size:
            first, second = sorted((int(where[rank[same[0]]]), int(where[rank[same[0] + 1]])))
            raise self._error(f"expected different n-grams, got that of line {first} again; remove one", second)
