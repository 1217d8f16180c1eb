"""Accuracy against a budget of seconds: one timestamped run a prompt and method, cut at each budget, then closed.

SpecDiff-2 (arXiv 2511.00606), section 7.2, figure 6. A run is decoded once, for the longest budget, with the time at
which each round's tokens were there; a shorter budget has the tokens that were there in time, so all budgets share one
run and one machine's mood. Each cut is closed and answered by the same decoder (`specdiff.reasoning`); the answer's own
time is recorded but not part of the budget.

The file is JSON lines: a header with what the study is of, then a row for each prompt and method, appended whole and
synced. A killed study loses the row in progress and continues with the next call. Rows hold ids and hashes of prompts,
not their text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import filelock

from specdiff import __version__
from specdiff.bench.answers import final_number
from specdiff.bench.tune import target_identity
from specdiff.checking import integer, real
from specdiff.corpus.writer import RowWriter, repair_tail
from specdiff.decoder import Generation, SpeculativeDecoder
from specdiff.errors import InputError
from specdiff.reasoning import Closing, close, closing_ids, thought_room
from specdiff.records import RoundEvent
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

FORMAT, VERSION = "specdiff reason-study", 1
INSTRUCTION = "Think step by step."


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with a number as its answer.

    Attributes:
        id: name. text: the question. expected: the answer, as text in which `final_number` finds it.
    """

    id: str
    text: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What every run of a study has in common.

    Attributes:
        budgets: seconds, > 0; kept sorted, each once. max_new_tokens: most tokens of a thought.
        closing: what the target is told at the cut. instruction: put behind each question, "" for none.
        temperature, seed: of thoughts and answers. chat: questions and closings in the chat template.

    Raises:
        InputError: no budget, or a number out of range.
    """

    budgets: tuple[float, ...]
    max_new_tokens: int = 2048
    closing: Closing = field(default_factory=Closing)
    instruction: str = INSTRUCTION
    temperature: float = 0.0
    seed: int = 0
    chat: bool = True

    def __post_init__(self) -> None:
        if not self.budgets:
            raise InputError.of("budgets", expected="at least one", got=self.budgets, remedy="give seconds")
        checked = {
            real("budget", b, lambda v: 0 < v < float("inf"), expected="seconds > 0", remedy="for example 15")
            for b in self.budgets
        }
        object.__setattr__(self, "budgets", tuple(sorted(checked)))
        integer("max_new_tokens", self.max_new_tokens, 1, remedy="a thought needs at least one token")
        integer("seed", self.seed, 0, remedy="pass an integer >= 0")
        SamplingOptions(temperature=self.temperature)  # refuses what is none


def read_questions(path: Path, *, limit: int | None = None) -> list[Question]:
    """Questions of a file of JSON objects with ``prompt``, ``answer`` and, if they are named, ``id``.

    Raises:
        InputError: the file cannot be read, a line is none, or its answer is no number (named by line).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError.of("file", expected="a readable UTF-8 file", got=str(path), remedy="check the path") from error
    questions: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (limit is not None and len(questions) >= limit):
            continue
        try:
            item = json.loads(line)
            text, expected = item["prompt"], str(item["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError.of(
                f"{path.name} line {number}",
                expected="a JSON object with 'prompt' and 'answer'",
                got=line[:80],
                remedy="fix or remove the line",
            ) from error
        if not isinstance(text, str) or not text.strip() or final_number(expected) is None:
            raise InputError.of(
                f"{path.name} line {number}",
                expected="a text and an answer with a number",
                got=(text, expected),
                remedy="fix or remove the line",
            )
        questions.append(Question(id=str(item.get("id", f"{path.stem}/{number}")), text=text, expected=expected))
    if not questions:
        raise InputError.of("file", expected="at least one question", got=str(path), remedy="check the file")
    if len({q.id for q in questions}) < len(questions):
        raise InputError.of("file", expected="ids that differ", got=str(path), remedy="rename or drop the doubles")
    return questions


def study_identity(
    methods: Mapping[str, SpeculativeDecoder], questions: Sequence[Question], options: StudyOptions
) -> dict[str, Any]:
    """What rows must have in common to be compared: methods (with target and machine), options and questions."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps(asdict(question), sort_keys=True).encode() + b"\n")
    pairs: dict[str, Any] = {}
    for name, decoder in methods.items():
        settings = decoder.settings
        pairs[name] = target_identity(decoder) | {
            "drafter": None if decoder.drafter is None else decoder.drafter.name,
            "rule": settings.rule,
            "budget": None if settings.budget is None else str(settings.budget),
            "gamma": settings.gamma,
            "controller": getattr(settings.controller, "__qualname__", str(type(settings.controller).__name__)),
        }
    return {
        "methods": pairs,
        "options": json.loads(json.dumps(asdict(options))),
        "questions": len(questions),
        "questions_sha256": digest.hexdigest(),
        "specdiff": __version__,
    }


def run_study(
    methods: Mapping[str, SpeculativeDecoder],
    questions: Sequence[Question],
    options: StudyOptions,
    out: Path,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Run what is missing of a study and return all of its rows.

    Methods take turns prompt by prompt, each after an untimed warm-up on the first question.

    Args:
        methods: decoders by name, of one target. out: the file, made or continued.
        clock: seconds; on an accelerator it must wait for the device. progress: told rows done and rows in all.

    Raises:
        InputError: no methods or questions; the file is of another study, broken, or being written by another process.
        ContextOverflowError: a question leaves no room to think. CorpusWriteError: the file cannot be written.
    """
    if not methods or not questions:
        raise InputError.of(
            "study", expected="methods and questions", got=(len(methods), len(questions)), remedy="give at least one"
        )
    identity = study_identity(methods, questions, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out.with_name(f".{out.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise InputError.of(
            "out", expected="a file that no other study writes", got=str(out), remedy="wait for it, or name another"
        ) from error
    try:
        rows = _resume(out, identity)
        done = {(row["id"], row["method"]) for row in rows}
        total = len(questions) * len(methods)
        progress(len(rows), total)
        if len(rows) < total:
            for decoder in methods.values():
                _warm_up(decoder, questions[0], options)
        writer = RowWriter(out)
        try:
            names = list(methods)
            for index, question in enumerate(questions):
                shift = index % len(names)
                for name in names[shift:] + names[:shift]:
                    if (question.id, name) not in done:
                        rows.append(run_question(name, methods[name], question, options, clock))
                        writer.append([_line(rows[-1])])
                        progress(len(rows), total)
        finally:
            writer.close()
    finally:
        lock.release()
    return rows


def read_study(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a study's file.

    Raises:
        InputError: it cannot be read or is no such file.
    """
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise ValueError((header["format"], header["version"]))
        for row in rows:
            if not {"id", "method", "cuts"} <= row.keys():
                raise ValueError(sorted(row))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError.of(
            "study",
            expected=f"a file of {FORMAT}, version {VERSION}",
            got=f"{path}: {error!r}",
            remedy="name another file, or move this one away",
        ) from error
    return header["identity"], rows


def run_question(
    name: str,
    decoder: SpeculativeDecoder,
    question: Question,
    options: StudyOptions,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """One row: a thought for the longest budget, then an answer for each cut."""
    prompt = decoder.encode(_prompt(question, options), chat=options.chat)
    tail = closing_ids(decoder, options.closing, chat=options.chat)
    room = thought_room(decoder, prompt, tail, options.closing, options.max_new_tokens)
    sampling = SamplingOptions(temperature=options.temperature)
    marks: list[tuple[int, float]] = []  # tokens so far, seconds since the start

    def mark(event: RoundEvent) -> None:
        marks.append(((marks[-1][0] if marks else 0) + event.record.committed, clock() - began))

    began = clock()
    thought = cast(
        Generation,
        decoder.generate(
            prompt,
            sampling=sampling,
            stop=StopOptions(max_new_tokens=room, max_time=options.budgets[-1]),
            seed=options.seed,
            clock=clock,
            on_round=mark,
        ),
    )
    wanted = final_number(question.expected)
    cuts: list[dict[str, Any]] = []
    answers: dict[int, tuple[Generation, float]] = {}
    for budget in options.budgets:
        kept = tokens_in_time(marks, budget)
        if kept not in answers:
            start = clock()
            answer = close(
                decoder, prompt, thought.tokens[:kept], tail, options.closing, sampling=sampling, seed=options.seed
            )
            answers[kept] = answer, clock() - start
        answer, seconds = answers[kept]
        given = final_number(first_line(answer.text))
        cuts.append(
            {
                "budget": budget,
                "tokens": kept,
                "finished": kept == len(thought.tokens) and thought.finish.value != "time",
                "answer": answer.text,
                "answer_tokens": list(answer.tokens),
                "answer_seconds": seconds,
                "given": None if given is None else str(given),
                "correct": given is not None and given == wanted,
            }
        )
    return {
        "id": question.id,
        "prompt_sha256": hashlib.sha256(question.text.encode()).hexdigest(),
        "method": name,
        "expected": str(wanted),
        "prompt_tokens": thought.prompt_tokens,
        "tokens": list(thought.tokens),
        "marks": [list(m) for m in marks],
        "finish": thought.finish.value,
        "tau": thought.totals.tau,
        "cuts": cuts,
    }


def tokens_in_time(marks: Sequence[tuple[int, float]], budget: float) -> int:
    """How many tokens were there after ``budget`` seconds, by (tokens so far, seconds) of each round."""
    return max((count for count, seconds in marks if seconds <= budget), default=0)


def first_line(text: str) -> str:
    """The first line of an answer that says anything: a model that rambles on is judged by what it said first."""
    return next((line for line in text.splitlines() if line.strip()), "")


def _prompt(question: Question, options: StudyOptions) -> str:
    return f"{question.text}\n\n{options.instruction}" if options.instruction else question.text


def _warm_up(decoder: SpeculativeDecoder, question: Question, options: StudyOptions) -> None:
    prompt = decoder.encode(_prompt(question, options), chat=options.chat)
    decoder.generate(prompt, max_new_tokens=8, temperature=options.temperature)


def _resume(out: Path, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that are there; writes the header of a new file."""
    if out.exists():
        repair_tail(out)
    if not out.exists() or out.stat().st_size == 0:
        writer = RowWriter(out)
        try:
            writer.append([_line({"format": FORMAT, "version": VERSION, "identity": identity})])
        finally:
            writer.close()
        return []
    found, rows = read_study(out)
    differs = [k for k in sorted({*identity, *found}) if identity.get(k) != found.get(k)]
    if differs:
        raise InputError.of(
            "out",
            expected=", ".join(f"{k} {identity.get(k)!r}" for k in differs),
            got=", ".join(f"{k} {found.get(k)!r}" for k in differs),
            remedy=f"{out} is of another study; name another file",
        )
    return rows


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
