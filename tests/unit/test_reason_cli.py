"""``specdiff reason``, ``reason-study`` and ``scale``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.cli.reason import parse_method, parse_numbers
from specdiff.errors import InputError
from support.tiny_targets import tiny_model
from support.tokenizing import byte_level


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with a byte-level tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_reason_thinks_then_answers(target):
    options = ("--target", target, "--drafter", "ngram", "--raw", "--budget", "1000", "-n", "9", "--answer-tokens", "4")
    done = run("reason", "the fox", *options, "--json")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert (len(row["tokens"]), row["finish"], len(row["answer_tokens"])) == (9, "length", 4)
    shown = run("reason", "the fox", *options)
    assert "The final answer is" in shown.stdout
    hurried = run("reason", "the fox", *options, "--budget", "1e-6", "--json")
    assert json.loads(hurried.stdout)["finish"] == "time"
    assert isinstance(run("reason", "a", *options, "--budget", "0").exception, InputError)


def test_a_study_writes_rows_tables_and_a_plot(target, tmp_path: Path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "one", "answer": "1"}\n{"prompt": "two", "answer": "2"}\n')
    out = tmp_path / "study.jsonl"
    command = ["reason-study", str(questions), "--out", str(out), "--target", target, "--raw", "-n", "6"]
    command += ["--budgets", "500,1000", "--answer-tokens", "2", "--method", "plain=none"]
    command += ["--method", "aligned=ngram@gamma=3", "--no-png"]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "| plain |" in done.stdout
    assert len(out.read_text().splitlines()) == 5
    assert json.loads((tmp_path / "study.json").read_text())["prompts"] == 2
    assert (tmp_path / "study.md").read_text() == done.stdout
    rows = out.read_bytes()
    assert run(*command).exit_code == 0
    assert out.read_bytes() == rows
    for wrong in (["--out", str(tmp_path / "study.json")], ["--limit", "0"], ["--method", "plain=none@speed=9"]):
        assert isinstance(run(*command, *wrong).exception, InputError), wrong
    assert isinstance(run(*command, "--method", "plain=ngram").exception, InputError)  # a name twice
    assert out.read_bytes() == rows


def test_methods_and_numbers_are_read_or_refused():
    assert parse_method("a=b/c@shape=siblings:3,1@gamma=4") == ("a", "b/c", {"shape": "siblings:3,1", "gamma": "4"})
    for wrong in ("a", "=b", "a=", "a=b@gamma", "a=b@gamma=", "a=b@gamma=1@gamma=2", "a=b@x=1"):
        with pytest.raises(InputError, match="--method"):
            parse_method(wrong)
    assert parse_numbers("--budgets", "1,2.5") == (1.0, 2.5)
    for wrong in ("", "1,", "a", "0", "-1", "inf", "nan"):
        with pytest.raises(InputError, match="--budgets"):
            parse_numbers("--budgets", wrong)


def test_scale_projects_from_a_file(tmp_path: Path):
    times = {"target_seconds": 6.0, "draft_seconds": 1.0, "verify_seconds": 1.0}
    drafted = {"prompt": "a", "totals": times | {"rounds": 2, "proposed": 4, "acceptance_by_position": [0.5, 0.25]}}
    (tmp_path / "d.jsonl").write_text(json.dumps(drafted) + "\n")
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "a", "totals": times | {"rounds": 4, "proposed": 0}}) + "\n"
    )
    entry = {"name": "a", "target_parameters": 1e9, "drafter_parameters": 1e8, "drafted": "d.jsonl", "plain": "p.jsonl"}
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps({"pairs": [entry]}))
    done = run("scale", str(file), "--target", "1e9", "--drafters", "1e8", "--json", "--resamples", "20")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    # step 2 s, round 3 + .5 + .5 s, tau 1.75
    assert report["projections"][0]["speedup"] == pytest.approx(1.75 * 2 / 4)
    assert report["hold_out"] == []
    shown = run("scale", str(file), "--resamples", "20")
    assert "best drafter for 72B" in shown.stdout
    assert "cannot be measured" in shown.stdout
    for wrong in (["--beta", "1"], ["--gamma", "0"], ["--drafters", "x"], ["-t", "-1"]):
        assert isinstance(run("scale", str(file), *wrong).exception, InputError), wrong
