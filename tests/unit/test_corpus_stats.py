"""Figures of a corpus, its draft vocabulary, and the commands that show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.corpus.problems import Broken, CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.corpus.stats import corpus_stats, covering, write_vocabulary
from specdiff.errors import InputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    answers = [(5, 5, 5, 9), (5, 6, 7, 9), (5, 5, 5, 9), (8,), (5,) * 7 + (6, 6)]
    rows = [
        CorpusRow(
            id=f"p{n // 3}", sample=n % 3, prompt_ids=(1,) * (n // 3 + 1), ids=ids, logprobs=(-1.5,) * len(ids),
            finish="eos" if ids[-1] == 9 else "length", seed=n,
        )
        for n, ids in enumerate(answers)
    ]  # fmt: skip
    file.write_bytes(b"".join(row.to_line() for row in rows))
    return file


def test_figures(path: Path) -> None:
    found = corpus_stats(path)
    assert (found.rows, found.prompts, found.tokens, found.expected) == (5, 2, 22, None)
    assert found.counts == ((5, 14), (6, 3), (9, 3), (7, 1), (8, 1))
    assert found.coverage == (3, 4, 5, 5, 5)  # of 22 tokens: 14, 17, 20, 21, 22
    assert found.finish == {"eos": 3, "length": 2}
    assert found.duplicate_answers == 1
    assert found.prompt_lengths == (1, 1, 1, 1, 2, 2, 2, 2)
    assert (found.answer_lengths[0], found.answer_lengths[3], found.answer_lengths[-1]) == (1, 4, 9)
    assert found.mean_logprob == -1.5
    assert found.broken == ()


def test_coverage_is_the_fewest_tokens_that_reach_it() -> None:
    counts = [(4, 90), (2, 9), (7, 1)]
    assert [covering(counts, share) for share in (0.5, 0.9, 0.91, 0.99, 0.991, 1.0)] == [
        [4], [4], [4, 2], [4, 2], [4, 2, 7], [4, 2, 7],
    ]  # fmt: skip


def test_a_draft_vocabulary_is_written(path: Path, tmp_path: Path) -> None:
    found, out = corpus_stats(path), tmp_path / "vocabulary.json"
    assert write_vocabulary(out, found, size=2) == 2
    assert json.loads(out.read_text()) == [5, 6]
    assert write_vocabulary(out, found, coverage=1.0) == 5
    assert json.loads(out.read_text()) == [5, 6, 7, 8, 9]
    for options in ({}, {"size": 1, "coverage": 0.5}, {"size": 0}, {"coverage": 0.0}, {"coverage": 1.1}):
        with pytest.raises(CorpusError, match="vocabulary"):
            write_vocabulary(out, found, **options)


def test_stats_and_check_by_command(path: Path, tmp_path: Path) -> None:
    run = CliRunner()
    out = tmp_path / "vocabulary.json"
    shown = run.invoke(app, ["corpus", "stats", str(path), "--vocab-out", str(out)])
    assert shown.exit_code == 0
    for words in ("5, 2 prompts, 22 answer tokens", "90.0% 3", "eos 3, length 2", "duplicate answers"):
        assert words in " ".join(shown.stdout.split())
    assert json.loads(out.read_text()) == [5, 6, 7, 8, 9]
    figures = json.loads(run.invoke(app, ["corpus", "stats", str(path), "--json"]).stdout)
    assert figures["distinct_tokens_for_coverage"] == {"0.9": 3, "0.95": 4, "0.99": 5, "0.999": 5, "1.0": 5}
    assert run.invoke(app, ["corpus", "check", str(path)]).exit_code == 0
    path.write_bytes(path.read_bytes() + b"{}\n" + path.read_bytes()[:20])
    broken = run.invoke(app, ["corpus", "check", str(path)])
    assert broken.exit_code == 1
    assert f"{path}, line 6: missing field" in broken.stderr
    assert f"{path}, line 7: truncated line" in broken.stderr
    assert "5 rows are sound, 2 lines are broken, 0 rows are missing" in broken.stderr
    found = json.loads(run.invoke(app, ["corpus", "check", str(path), "--json"]).stdout)
    assert [(item["line"], item["kind"]) for item in found["broken"]] == [
        (6, Broken.MISSING_FIELD.value), (7, Broken.TRUNCATED.value),
    ]  # fmt: skip
    assert run.invoke(app, ["corpus", "stats", str(path)]).exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompts", "a.jsonl", "--preset", "specdiff2-qwen"],
        ["--preset", "other"],
        ["--prompts", "a.jsonl", "--shard", "3/2"],
        ["--prompts", "a.jsonl", "--backend", "other"],
        ["--prompts", "a.jsonl", "--backend", "vllm", "--workers", "2"],
        ["--prompts", "a.jsonl", "-t", "0", "-k", "2"],
        ["--prompts", "a.jsonl", "--target", "no such model"],
    ],
)
def test_requests_that_make_no_sense_are_refused_before_anything_is_loaded(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = CliRunner().invoke(app, ["corpus", "make", str(tmp_path / "out"), *arguments])
    assert isinstance(result.exception, InputError)
    assert not (tmp_path / "out").exists()
