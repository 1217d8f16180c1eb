"""One row of a corpus, and the one place where a line becomes a row or is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specdiff.corpus.problems import Broken, BrokenRowError

Finish = Literal["eos", "length"]
"""Why an answer ended: an end-of-sequence token (kept, as the last id), or the most tokens asked for."""

LAW = (
    "natural logarithm of softmax(logits) over the target's whole vocabulary at temperature 1, without top-p or any "
    "other filter, whatever law the tokens were drawn from; computed in float32 (float64 for a float64 model) from the "
    "logits of the backend's own pass, rounded to 6 decimals"
)
"""The law of `CorpusRow.logprobs`, as every manifest states it."""

_DECIMALS = 6
_ROUNDING = 1e-4  # a log-probability of a certain token may come out this far above zero
_FIELDS = ("id", "sample", "prompt_ids", "ids", "logprobs", "finish", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusRow:
    """A prompt and one answer of the target, n = tokens of the answer.

    Attributes:
        id: name of the prompt. sample: which of its answers, from 0.
        prompt_ids: the prompt's tokens, at least one, chat template included.
        ids: [n] the answer's tokens as they were drawn, at least one.
        logprobs: [n] the target's log-probability of each, under the law `LAW`.
        finish: see `Finish`.
        seed: of this row alone; its uniforms depend on nothing else.
    """

    id: str
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What no two rows of a corpus share."""
        return self.id, self.sample

    def to_line(self) -> bytes:
        """The row as one line of JSON, ASCII, newline included."""
        logprobs = [round(x, _DECIMALS) + 0.0 for x in self.logprobs]  # + 0.0: no "-0.0"
        values = (self.id, self.sample, self.prompt_ids, self.ids, logprobs, self.finish, self.seed)
        return json.dumps(dict(zip(_FIELDS, values, strict=True)), separators=(",", ":")).encode() + b"\n"


class _Refused(Exception):
    """A line is not a row; becomes a `BrokenRowError` where file and line are known."""

    def __init__(self, kind: Broken, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def parse_line(
    line: bytes, path: Path, number: int, *, vocab_size: int | None = None, eos_ids: Sequence[int] = ()
) -> CorpusRow:
    """Turn one line, newline included, into a row.

    Args:
        line: its bytes. path, number: where it stands, for the message.
        vocab_size: ids must be below it, where known. eos_ids: the last id of an answer that finished with ``eos`` must
            be one of them, where known.

    Raises:
        BrokenRowError: it is not a row, and why.
    """
    try:
        return _row(_object(line, number), vocab_size, eos_ids)
    except _Refused as refused:
        raise BrokenRowError(path, number, refused.kind, str(refused)) from None


def _object(line: bytes, number: int) -> dict[str, Any]:
    whole = line.endswith(b"\n")
    if not line.strip():
        raise _Refused(Broken.BLANK, "expected a JSON object; remove the line")
    if line.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _Refused(Broken.BOM, "expected UTF-8 without a byte-order mark; remove the file's first bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Refused(
            Broken.ENCODING if whole else Broken.TRUNCATED, f"byte {error.start} is {line[error.start]:#04x}"
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if not whole:
            message = f"ends in {line[-40:]!r}; make the corpus again to repair it, or remove the line"
            raise _Refused(Broken.TRUNCATED, message) from error
        raise _Refused(Broken.NOT_JSON, f"{error}, got {line[:60]!r}") from error
    if not isinstance(value, dict):
        raise _Refused(Broken.NOT_OBJECT, f"expected a JSON object, got {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(Broken.REPEATED_FIELD, f"{twice!r} stands there more than once")
    return fields


def _row(item: dict[str, Any], vocab_size: int | None, eos_ids: Sequence[int]) -> CorpusRow:
    missing = [name for name in _FIELDS if name not in item]
    if missing:
        raise _Refused(Broken.MISSING_FIELD, f"expected {', '.join(_FIELDS)}, got no {missing[0]!r}")
    name = item["id"]
    if not isinstance(name, str):
        raise _Refused(Broken.WRONG_TYPE, f"id: expected a string, got {name!r:.60}")
    if not name:
        raise _Refused(Broken.EMPTY_NAME, "id: expected the prompt's name, got ''")
    prompt_ids = _token_ids("prompt_ids", item["prompt_ids"], vocab_size)
    ids = _token_ids("ids", item["ids"], vocab_size)
    logprobs = _logprobs(item["logprobs"])
    if not prompt_ids:
        raise _Refused(Broken.EMPTY_PROMPT, "prompt_ids: expected at least one token")
    if not ids:
        raise _Refused(Broken.EMPTY_ANSWER, "ids: expected at least one token")
    if len(logprobs) != len(ids):
        raise _Refused(
            Broken.LENGTHS_DIFFER, f"expected one log-probability a token, got {len(logprobs)} of {len(ids)}"
        )
    finish = item["finish"]
    if finish not in get_args(Finish):
        raise _Refused(Broken.FINISH, f"expected one of {', '.join(get_args(Finish))}, got {finish!r:.60}")
    if finish == "eos" and eos_ids and ids[-1] not in eos_ids:
        raise _Refused(Broken.FINISH, f"finished with eos, but the last id is {ids[-1]}, not one of {list(eos_ids)}")
    return CorpusRow(
        id=name,
        sample=_count("sample", item["sample"]),
        prompt_ids=prompt_ids,
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        seed=_count("seed", item["seed"]),
    )


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise _Refused(Broken.WRONG_TYPE, f"{name}: expected an integer >= 0, got {value!r:.60}")
    return value


def _token_ids(name: str, values: object, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        got = next((v for v in values if type(v) is not int), None) if isinstance(values, list) else values
        raise _Refused(Broken.WRONG_TYPE, f"{name}: expected a list of integers, got {got!r:.60}")
    if values and min(values) < 0:
        raise _Refused(Broken.NEGATIVE_ID, f"{name}: expected token ids >= 0, got {min(values)}")
    if values and vocab_size is not None and max(values) >= vocab_size:
        raise _Refused(Broken.UNKNOWN_ID, f"{name}: expected token ids below {vocab_size}, got {max(values)}")
    return tuple(values)


def _logprobs(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(v) in (float, int) for v in values):
        raise _Refused(Broken.WRONG_TYPE, f"logprobs: expected a list of numbers, got {values!r:.60}")
    try:
        numbers = tuple(float(v) for v in values)
    except OverflowError:
        numbers = (math.inf,)
    for number in numbers:
        if not math.isfinite(number):
            raise _Refused(Broken.NOT_FINITE, f"logprobs: expected finite numbers, got {number}")
        if number > _ROUNDING:
            raise _Refused(Broken.POSITIVE_LOGPROB, f"logprobs: expected numbers <= 0, got {number}")
    return numbers
