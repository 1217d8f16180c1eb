"""The budgeted study: cuts, resuming, and figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdiff.bench.budgeted import (
    Question,
    StudyOptions,
    first_line,
    read_questions,
    read_study,
    run_study,
    tokens_in_time,
)
from specdiff.bench.budgeted_report import markdown, plot, summarise
from specdiff.decoder import SpeculativeDecoder
from specdiff.drafters.ngram import NgramDrafter
from specdiff.errors import InputError
from specdiff.reasoning import Closing
from specdiff.testing import TableTarget
from support.tokenizing import byte_level

TOKENIZER = byte_level()
V = len(TOKENIZER)
_LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
TARGET = TableTarget(torch.softmax(_LOGITS, -1).expand(V, V, V))
METHODS = {
    "plain": SpeculativeDecoder(TARGET, None, TOKENIZER),
    "aligned": SpeculativeDecoder(TARGET, NgramDrafter(vocab_size=V), TOKENIZER),
}
QUESTIONS = [Question(id=f"q{i}", text=f"the fox {i}", expected=f"#### {i}") for i in range(3)]
OPTIONS = StudyOptions(budgets=(8.0, 2.0, 8.0, 4.0), closing=Closing(answer_tokens=3), chat=False)


class Ticking:
    """An eighth of a second at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.125
        return self.now


class Killed(Exception):
    """Stands for a kill between two rows."""


def study(out: Path, **options):
    return run_study(METHODS, QUESTIONS, OPTIONS, out, clock=Ticking(), **options)


def test_a_budget_has_the_tokens_that_were_there_in_time():
    marks = [(2, 0.5), (3, 1.0), (7, 2.5)]
    assert [tokens_in_time(marks, b) for b in (0.4, 0.5, 1.0, 2.4, 2.5, 9)] == [0, 2, 3, 3, 7, 7]
    assert tokens_in_time([], 1.0) == 0


def test_a_study_cuts_one_run_at_each_budget(tmp_path: Path):
    rows = study(tmp_path / "study.jsonl")
    assert [(r["id"], r["method"]) for r in rows] == [
        ("q0", "plain"), ("q0", "aligned"), ("q1", "aligned"), ("q1", "plain"), ("q2", "plain"), ("q2", "aligned"),
    ]  # fmt: skip
    texts = {}
    for row in rows:
        assert [c["budget"] for c in row["cuts"]] == [2.0, 4.0, 8.0]
        counts = [c["tokens"] for c in row["cuts"]]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] <= len(row["tokens"]) == row["marks"][-1][0]
        assert not any(c["finished"] for c in row["cuts"])
        assert row["finish"] == "time"
        assert all(len(c["answer_tokens"]) == 3 for c in row["cuts"])
        texts.setdefault(row["id"], []).append(row["tokens"])
    for one, two in texts.values():  # temperature 0: one text, longer or shorter
        assert one[: len(two)] == two[: len(one)]
    assert "the fox" not in (tmp_path / "study.jsonl").read_text()


def test_a_killed_study_loses_one_row_and_goes_on(tmp_path: Path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    study(whole)

    def kill(done: int, total: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        study(cut, progress=kill)
    with cut.open("ab") as file:
        file.write(b'{"id": "q9", "meth')  # what a kill in the middle of a write leaves
    told: list[tuple[int, int]] = []
    rows = study(cut, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 6), (5, 6), (6, 6)]
    assert [(r["id"], r["method"]) for r in rows] == [(r["id"], r["method"]) for r in read_study(whole)[1]]
    assert read_study(cut)[1] == rows
    assert study(cut) == rows  # nothing is left to do


def test_files_of_another_study_are_refused(tmp_path: Path):
    out = tmp_path / "study.jsonl"
    study(out)
    before = out.read_bytes()
    for methods, questions, options in (
        (METHODS, QUESTIONS[:2], OPTIONS),
        (METHODS, QUESTIONS, StudyOptions(budgets=(2.0,), chat=False)),
        ({"plain": METHODS["plain"]}, QUESTIONS, OPTIONS),
    ):
        with pytest.raises(InputError, match="another study"):
            run_study(methods, questions, options, out, clock=Ticking())
    assert out.read_bytes() == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="version"):
        study(other)
    with pytest.raises(InputError, match="at least one"):
        run_study({}, QUESTIONS, OPTIONS, out)


@pytest.mark.parametrize("budgets", [(), (0.0,), (-1.0,), (float("inf"),), (True,)])
def test_budgets_that_mean_nothing_are_refused(budgets):
    with pytest.raises(InputError, match="budget"):
        StudyOptions(budgets=budgets)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": "a"}', '{"prompt": "", "answer": "1"}', '{"prompt": "a", "answer": "none"}']
)
def test_questions_are_read_or_named(tmp_path: Path, line):
    file = tmp_path / "q.jsonl"
    file.write_text('{"id": "x", "prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": 2}\n')
    assert read_questions(file) == [
        Question(id="x", text="a", expected="1"),
        Question(id="q/3", text="b", expected="2"),
    ]
    assert len(read_questions(file, limit=1)) == 1
    file.write_text('{"prompt": "a", "answer": "1"}\n' + line + "\n")
    with pytest.raises(InputError, match=r"q.jsonl line 2"):
        read_questions(file)


def test_an_answer_is_its_first_line_that_says_anything():
    assert first_line("\n  \n 18 eggs\n19") == " 18 eggs"
    assert first_line(" \n") == ""


BUDGETS = (5, 10)


def row(prompt: str, method: str, *correct: bool, tokens: int = 10) -> dict:
    cuts = [
        {"budget": b, "tokens": tokens, "finished": b > 5, "correct": c} for b, c in zip((5, 10), correct, strict=True)
    ]
    return {"id": prompt, "method": method, "cuts": cuts}


ROWS = [
    *(row(f"p{i}", "plain", False, i < 2) for i in range(4)),
    *(row(f"p{i}", "aligned", i == 0, i < 3, tokens=20) for i in range(4)),
    row("p4", "plain", True, True),  # no row of the other method: left out
]


def test_a_report_worked_out_by_hand(tmp_path: Path):
    found = summarise(ROWS)
    assert found.prompts == 4
    assert [(p.method, p.budget, p.accuracy, p.tokens, p.finished) for p in found.points] == [
        ("plain", 5, 0.0, 10, 0), ("plain", 10, 0.5, 10, 1), ("aligned", 5, 0.25, 20, 0), ("aligned", 10, 0.75, 20, 1),
    ]  # fmt: skip
    first, second = found.gains
    assert (first.over, first.difference, first.relative, first.paper) == ("plain", 0.25, None, 0.63)
    assert (second.difference, second.relative) == (0.25, 0.5)
    low, high = second.difference_interval
    assert 0 <= low <= 0.25 <= high <= 1  # aligned is right wherever plain is: never below 0
    assert found.points[0].interval == (0.0, 0.0)
    assert summarise(ROWS) == found
    text = markdown(found)
    assert "| aligned over plain | 10 s | +25.0" in text
    assert "+63%" in text
    assert "75.0 %" in text
    json.dumps(found.to_dict())
    with pytest.raises(InputError, match="every method"):
        summarise([row("a", "x", True, True), row("b", "y", True, True)])


def test_the_plot_is_written_whole(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot(summarise(ROWS), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["plot.png"]
