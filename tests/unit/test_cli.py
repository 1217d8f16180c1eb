"""The command line: inputs, outputs, and one clear line for what is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import specdiff
from specdiff.bench.compare import first_difference
from specdiff.cli.app import Commands, app
from specdiff.cli.generate import agreement, read_prompts
from specdiff.cli.show import folding_table
from specdiff.errors import InputError, PairingError
from specdiff.shapes import parse_shape
from specdiff.types import (
    EAGLE_TREE,
    BestFirst,
    Budget,
    CausalPaths,
    Chain,
    DynamicTree,
    Samples,
    Siblings,
    StaticTree,
)
from support.tiny_targets import tiny_model
from support.tokenizing import byte_level


def test_help_and_version_do_not_wait_for_torch() -> None:
    for argument in ("--help", "--version"):
        code = (
            "import sys\nfrom specdiff.cli.app import main\n"
            f"sys.argv = ['specdiff', '{argument}']\n"
            "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code\n"
            "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "specdiff" in done.stdout
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(name in shown for name in Commands.places)


@pytest.mark.parametrize("name", Commands.places)
def test_every_command_is_where_the_help_says(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert f"specdiff {name}" in shown.output


def test_an_unknown_command_is_told() -> None:
    done = CliRunner().invoke(app, ["generat"])
    assert done.exit_code == 2
    assert "No such command" in done.output


@pytest.mark.parametrize(("shape", "named"), [("samples:0", "Samples.k"), ("best-first:0", "BestFirst.nodes")])
def test_a_count_out_of_range_is_named_after_its_shape(shape: str, named: str) -> None:
    with pytest.raises(InputError, match=rf"^{named}: expected an integer >= 1, got 0"):
        Budget(gamma=2, shape=parse_shape(shape)).validate()


def test_values_of_tables_are_folded_not_cut() -> None:
    out = Console(width=40, file=io.StringIO())
    table = folding_table()
    table.add_row("name", "0123456789" * 8)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    assert "".join(out.file.getvalue().removeprefix("name").split()) == "0123456789" * 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with a byte-level tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=True)


def generate(target: str, *arguments: str, stdin: str | None = None):
    return run("generate", "--target", target, "--drafter", "ngram", "-n", "12", *arguments, stdin=stdin)


def test_json_holds_the_text_and_the_counts(target):
    done = generate(target, "--json", "The quick brown")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert len(row["tokens"]) == row["totals"]["tokens"] == 12
    assert row["finish"] == "length"
    assert row["prompt"] == "The quick brown"


def test_stdin_and_argument_give_the_same_text(target):
    given = json.loads(generate(target, "--json", "The quick").stdout)
    piped = json.loads(generate(target, "--json", stdin="The quick").stdout)
    dashed = json.loads(generate(target, "--json", "-", stdin="The quick").stdout)
    assert given["tokens"] == piped["tokens"] == dashed["tokens"]


def test_a_drafter_changes_nothing_but_the_passes(target):
    plain = json.loads(run("generate", "--target", target, "--drafter", "none", "-n", "12", "--json", "The fox").stdout)
    drafted = json.loads(generate(target, "--json", "The fox").stdout)
    itself = json.loads(
        run("generate", "--target", target, "--drafter", target, "-n", "12", "--json", "The fox").stdout
    )
    assert plain["tokens"] == drafted["tokens"] == itself["tokens"]
    assert itself["totals"]["target_passes"] < plain["totals"]["target_passes"] == 12


def test_files_of_prompts(target, tmp_path: Path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    rows = [json.loads(line) for line in generate(target, "--json", "--file", str(lines)).stdout.splitlines()]
    assert [r["prompt"] for r in rows] == ["one", "two"]
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    assert read_prompts(None, jsonl, 1) == ["a"]


def test_broken_files_are_named_by_line(tmp_path: Path):
    broken = tmp_path / "broken.jsonl"
    for bad in ("{", "[]", '{"text": "x"}', "7"):
        broken.write_text('{"prompt": "a"}\n' + bad + "\n", encoding="utf-8")
        with pytest.raises(InputError, match=r"broken.jsonl line 2"):
            read_prompts(None, broken, None)
    broken.write_text("\n", encoding="utf-8")
    with pytest.raises(InputError, match="at least one prompt"):
        read_prompts(None, broken, None)
    with pytest.raises(InputError, match="readable file"):
        read_prompts(None, tmp_path / "none.txt", None)
    with pytest.raises(InputError, match="both"):
        read_prompts("x", broken, None)


def test_plain_output_marks_kinds_by_colour_only_where_asked(target):
    coloured = generate(target, "--color", "The quick").stdout
    bare = generate(target, "--no-color", "The quick").stdout
    assert "\x1b[" in coloured
    assert "\x1b[" not in bare


def test_compare_prints_a_ratio_against_the_fastest(target):
    done = generate(target, "--compare", "--json", "The quick")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert set(row["tokens"]) == {"specdiff", "plain loop, float32", "transformers generate, float32"}
    assert {tuple(t) for t in row["tokens"].values()} == {(12,)}
    more = json.loads(generate(target, "--compare", "--compare-dtypes", "bf16,fp32", "--json", "The quick").stdout)
    assert set(more["tokens"]) == set(row["tokens"]) | {"plain loop, bfloat16", "transformers generate, bfloat16"}
    assert row["fastest_plain"] in row["tokens"]
    assert all(places == [None] for places in row["parted"].values())  # fp32: the same text
    assert row["speedup"] > 0


def test_where_texts_part_is_told():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert agreement([None, None]) == "the same text as"
    assert agreement([7]) == "the same text up to token 7 as"
    assert agreement([None, 3, None]) == "the same text on 2 of 3 prompts as"


def test_version():
    assert run("--version").stdout == f"specdiff {specdiff.__version__}\n"


def test_a_plan_is_measured_kept_and_used(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDIFF_HOME", str(tmp_path))
    missing = generate(target, "--controller", "planner", "The quick")
    assert isinstance(missing.exception, InputError)
    assert "specdiff tune" in str(missing.exception)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two\n", encoding="utf-8")
    tuned = run("tune", target, "ngram", "--file", str(prompts), "-n", "8", "--json")
    assert tuned.exit_code == 0, tuned.output
    report = json.loads(tuned.stdout)
    assert Path(report["path"]).parent == tmp_path / "plans"
    kept = Path(report["path"]).read_bytes()
    shown = json.loads(run("tune", target, "ngram", "--file", str(prompts), "--json").stdout)
    assert shown["seconds"] is None  # the plan that is there, not another one
    assert Path(report["path"]).read_bytes() == kept
    planned = json.loads(generate(target, "--controller", "planner", "--json", "The quick").stdout)
    fixed = json.loads(generate(target, "--json", "The quick").stdout)
    assert planned["tokens"] == fixed["tokens"]
    beside = generate(target, "--controller", "planner", "--gamma", "2", "The quick")
    assert isinstance(beside.exception, InputError)
    for bad in (("-t", "0"), ("-n", "1"), ("--check-dtypes", "fp32")):
        assert isinstance(run("tune", target, "ngram", *bad).exception, InputError)


def test_a_foreign_plan_is_explained_and_measured_again_where_asked(target, tmp_path: Path):
    prompts, plan = tmp_path / "prompts.txt", tmp_path / "plan.json"
    prompts.write_text("one two one two\n", encoding="utf-8")
    arguments = ("tune", target, "ngram", "--file", str(prompts), "-n", "8", "--out", str(plan), "--json")
    assert run(*arguments).exit_code == 0
    foreign = json.loads(plan.read_text())
    foreign["identity"]["processor"] = "another one"
    plan.write_text(json.dumps(foreign), encoding="utf-8")
    for refused in (run(*arguments), generate(target, "--controller", f"planner:{plan}", "The quick")):
        assert isinstance(refused.exception, InputError)
        assert "processor 'another one'" in str(refused.exception)
        assert "specdiff tune --again" in str(refused.exception)
    again = run(*arguments, "--again", "--check")
    assert again.exit_code == 0, again.output
    report = json.loads(again.stdout)
    assert [c["temperature"] for c in report["checks"]] == [0.0, 1.0]
    for check in report["checks"]:
        assert check["tau_ratio"] == pytest.approx(check["tau"] / check["predicted"]["tau"])
        assert check["speedup_ratio"] == pytest.approx(check["speedup"] / check["predicted"]["speedup"])
        assert check["speedup_over_fastest"] <= check["speedup"]
    assert json.loads(plan.read_text())["identity"] != foreign["identity"]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("chain", Chain()),
        ("samples:8", Samples(8)),
        ("siblings:6,2,1", Siblings((6, 2, 1))),
        ("best-first:24", BestFirst(24)),
        ("paths", CausalPaths()),
        ("paths:5", CausalPaths(beam=5, keep=5)),
        ("paths:2,beam=4,mass=0.9,cap=20,weight=0.7", CausalPaths(4, 2, 0.9, 20, 0.7)),
        ("paths:weight=1", CausalPaths(weight=1.0)),
        ("static:eagle", EAGLE_TREE),
        ("static:eagle,sampled", StaticTree(EAGLE_TREE.paths, sampled=True)),
        ("static:0,1,0.0", StaticTree(((0,), (1,), (0, 0)))),
        ("dynamic:", DynamicTree(60, 10)),
        ("dynamic:24", DynamicTree(24, 10)),
        ("dynamic:24,top=4", DynamicTree(24, 4)),
    ],
)
def test_shapes(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text",
    ["", "chain:3", "samples", "samples:x", "siblings:", "siblings:2;1", "tree:4", "static:", "dynamic:4,width=2"],
)
def test_unknown_shapes_are_refused(text):
    with pytest.raises(InputError, match="shape"):
        parse_shape(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--gamma", "0"),
        ("--shape", "samples:0"),
        ("--rule", "nonsense"),
        ("-n", "0"),
        ("--draft-temperature", "0"),
        ("--dtype", "int8"),
        ("--compare-dtypes", "bf16"),
        ("--limit", "2"),
        ("--shape", "samples:3"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--top-k", "0"),
    ],
)
def test_bad_options_are_refused(target, arguments):
    done = generate(target, *arguments, "x")
    assert isinstance(done.exception, InputError), done.output


def test_unknown_models_and_drafters_are_refused(target):
    assert isinstance(run("generate", "--target", "smollm3-135m", "x").exception, InputError)
    assert isinstance(run("generate", "--target", target, "--drafter", "nonsense", "x").exception, InputError)
    assert isinstance(run("generate", "--target", target, "x").exception, PairingError), (
        "the default drafter fits one target"
    )


def test_chat_converses_and_quits(target, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = byte_level()
    monkeypatch.setattr(tokenizer, "chat_template", template, raising=False)
    tokenizer.save_pretrained(target)
    done = run("chat", "--target", target, "--drafter", "ngram", "-n", "8", stdin="hello\n/clear\nagain\n/quit\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("tau") == 2


def test_help_names_every_command():
    out = run("--help").output
    assert all(name in out for name in ("generate", "chat", "models", "doctor", "profile"))


@pytest.mark.parametrize("option", [("--rule", "ratio"), ("--shape", "chain"), ("--gamma", "3")], ids=lambda o: o[0])
def test_options_of_drafts_are_refused_without_a_drafter(target, option):
    result = run("generate", "--target", target, "--drafter", "none", "-n", "4", *option, "The fox")
    assert isinstance(result.exception, InputError)
    assert option[0] in str(result.exception)
