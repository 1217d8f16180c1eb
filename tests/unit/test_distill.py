"""``specdiff distill`` from a corpus to a drafter that loads, resumed and refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.cli.distill import parse_corpus, parse_layers, parse_parameter
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.read import read_corpus
from specdiff.decoder import load
from specdiff.distill.data import split
from specdiff.distill.evaluate import DecodingEvaluator
from specdiff.distill.recipe import Recipe
from specdiff.distill.run import prepare
from specdiff.errors import CheckpointError, InputError, NumericsError
from specdiff.models.load_target import load_target
from specdiff.train.acceptance import measure_acceptance
from support.tokenizing import byte_level

PROMPTS = [f"{word} {n}" for n in range(6) for word in ("add", "the fox", "sub", "dog")]
SMALL = Recipe(
    layers=(0, 1),
    window=4,
    steps=4,
    rows=3,
    anchors=4,
    held_out=5,
    evaluate_tokens=12,
    dtype="fp32",
    learning_rate=3e-3,
)


def run(*arguments: str | Path, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, and its answers to a few prompts at temperatures 0 and 1."""
    home = tmp_path_factory.mktemp("distill")
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    for temperature, name in ((0, "t0"), (1, "t1")):
        run("corpus", "make", home / name, "--prompts", home / "prompts.jsonl", "--target", home / "target",
            "-t", temperature, "-n", 16, "--dtype", "fp32", "--raw", "--json")  # fmt: skip
    return home


@functools.cache
def target_of(folder: Path):
    return load_target(folder, dtype="fp32", device="cpu")


def prepared(home: Path, output: Path, recipe: Recipe = SMALL, **options):
    target, tokenizer = target_of(home / "target")
    corpora = [(home / "t0", 65.0), (home / "t1", 35.0)]
    return prepare(recipe, output, target, tokenizer, corpora, **options)


def lines_of(output: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_the_command_makes_a_drafter_that_drafts(home: Path, tmp_path: Path) -> None:
    arguments = [
        "distill", tmp_path / "run", "--corpus", f"{home / 't0'}:65", "--corpus", f"{home / 't1'}:35", "--target",
        home / "target", "--layers", "0-1", "--feature-layers", "1,2", "--window", 4, "--dtype", "fp32", "--steps", 3,
        "--rows", 3, "--anchors", 4, "--held-out", 5, "--evaluate-tokens", 12, "--objective", "tree_presence",
        "--parameter", "nodes=6", "--accumulate", 2, "--json",
    ]  # fmt: skip
    made = json.loads(run(*arguments).stdout)
    assert (made["step"], made["steps"]) == (3, 3)
    cases = lines_of(tmp_path / "run", "decode")[-1]
    for name in ("chain, T = 0", "tree, T = 0", "chain, T = 1", "siblings, T = 1", "tree, T = 1"):
        assert cases[name]["tau"] >= 1.0
    record = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert record["recipe"]["parameters"] == {"nodes": 6}
    assert [c["sampling"][0]["temperature"] for c in record["corpora"]] == [0.0, 1.0]
    pair = load(str(home / "target"), made["drafter"], dtype="fp32", device="cpu")
    assert pair.drafter is not None
    assert pair.drafter.feature_layers == (1, 2)
    plain = load(str(home / "target"), "none", dtype="fp32", device="cpu")
    assert pair.generate("add 7", max_new_tokens=12).tokens == plain.generate("add 7", max_new_tokens=12).tokens
    again = run(*arguments[:-1])  # finished: nothing is trained twice
    assert "step 3 of 3" in again.stderr
    assert len(lines_of(tmp_path / "run", "resume")) == 1


def test_a_run_goes_on_where_it_was_and_ends_as_if_never_stopped(home: Path, tmp_path: Path) -> None:
    whole = prepared(home, tmp_path / "whole")
    whole.run()
    first = prepared(home, tmp_path / "parts")
    step = first._train_step

    def stop_after_two() -> None:
        step()
        if first.step == 2:
            first._request_stop()

    first._train_step = stop_after_two  # type: ignore[method-assign]
    first.run()
    second = prepared(home, tmp_path / "parts")
    assert second.step == 2
    second.run()
    for one, two in zip(whole.master.weights, second.master.weights, strict=True):
        assert torch.equal(one, two)


def test_accumulated_batches_are_one_step_over_both(home: Path, tmp_path: Path) -> None:
    one = prepared(home, tmp_path / "one", Recipe(**vars(SMALL) | {"steps": 1, "accumulate": 2}))
    grads = []
    for number in (0, 1):
        other = prepared(home, tmp_path / f"single{number}", Recipe(**vars(SMALL) | {"steps": 1}))
        batch = other.stream.batch(number)
        other.stream.batch = lambda _, batch=batch: batch  # type: ignore[method-assign]
        other.master.step = lambda rate, step, other=other: (
            grads.append(  # type: ignore[method-assign]
                [p.grad for p in other.denoiser.parameters()]
            )
            or 0.0
        )
        other._train_step()
    seen = []
    one.master.step = lambda rate, step: seen.extend(p.grad for p in one.denoiser.parameters()) or 0.0  # type: ignore[method-assign]
    one._train_step()
    for got, a, b in zip(seen, *grads, strict=True):
        torch.testing.assert_close(got, (a + b) / 2)


def test_other_settings_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    prepared(home, tmp_path).run()
    with pytest.raises(InputError, match=r"recipe\.learning_rate was 0\.003, is 0\.001"):
        prepared(home, tmp_path, Recipe(**vars(SMALL) | {"learning_rate": 1e-3}))
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(CheckpointError, match="record of the run"):
        prepared(home, tmp_path)


def test_whole_prompts_are_held_out_of_all_corpora(home: Path) -> None:
    corpora = [(read_corpus(home / name), 1.0) for name in ("t0", "t1")]
    parts = split(corpora, held_out=5, window=4)
    out = {name for name, _ in parts.held_out}
    assert len(out) == 5
    for rows, _ in parts.sources:
        assert len(rows) == len(PROMPTS) - 5
        assert not out & {row.id for row in rows}
    assert {row.id for row in parts.replay} == out  # of the temperature-0 corpus only
    assert split(corpora[::-1], held_out=5, window=4).held_out == parts.held_out
    with pytest.raises(InputError, match="held_out: expected fewer than the 24"):
        split(corpora, held_out=24, window=4)
    with pytest.raises(InputError, match="window: expected at most 16"):
        split(corpora, held_out=5, window=17)


def test_decoding_agrees_with_the_replay_of_greedy_answers(home: Path, tmp_path: Path) -> None:
    """Two measures of one thing: the loop over the target, and the answers it gave before."""
    trainer = prepared(home, tmp_path, Recipe(**vars(SMALL) | {"steps": 30, "evaluate_tokens": 16}))
    trainer.run()
    target, _ = target_of(home / "target")
    prompts = [row.tokens[: row.prompt_length] for row in trainer.held_out]
    decoded = DecodingEvaluator(target, trainer.denoiser, prompts, max_new_tokens=16, nodes=15)(
        trainer.master.named(trainer.master.weights)
    )
    replayed = measure_acceptance(trainer.denoiser, trainer.held_out, trainer.labels_of, tree_nodes=15)
    assert replayed.tree > 1.1  # it has learnt something
    # the replay stops at the answer's end, where the loop drafts no further than there is room either
    assert decoded["chain, T = 0"]["tau"] == pytest.approx(replayed.chain, abs=1e-3)
    assert decoded["tree, T = 0"]["tau"] == pytest.approx(replayed.tree, abs=1e-3)


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_and_names_the_batch(home: Path, tmp_path: Path, spoil: str) -> None:
    trainer = prepared(home, tmp_path)
    trainer._train_step()
    trainer.checkpoint()
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    before = [w.clone() for w in trainer.master.weights]
    if spoil == "loss":
        objective = trainer.objective
        trainer.objective = type("Broken", (), {"loss": lambda _, w: _nan(objective.loss(w))})()  # type: ignore[assignment]
    else:
        next(trainer.denoiser.parameters()).register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NumericsError, match=r"step 1, batch 1 \(rows .*\); the last checkpoint") as caught:
        trainer.run()
    assert all(row in str(caught.value) for row in trainer.stream.row_ids(1))
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
    for one, two in zip(before, trainer.master.weights, strict=True):
        assert torch.equal(one, two)


def _nan(result):
    return type(result)(**{**vars(result), "loss": result.loss * float("nan")})


def test_a_full_disk_keeps_the_last_checkpoint(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = prepared(home, tmp_path)
    trainer.checkpoint()
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    trainer._train_step()

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="last checkpoint is kept: make room"):
        trainer.checkpoint()
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
    assert not list(tmp_path.glob(".checkpoint*"))


def test_corpora_of_another_target_are_refused(home: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(home / "target").config)
    other.save_pretrained(tmp_path / "other")
    byte_level().save_pretrained(tmp_path / "other")
    target, tokenizer = load_target(tmp_path / "other", dtype="fp32", device="cpu")
    with pytest.raises(CorpusError, match="another model"):
        prepare(SMALL, tmp_path / "run", target, tokenizer, [(home / "t0", 1.0)])
    assert not (tmp_path / "run").exists()
    prepare(SMALL, tmp_path / "run", target, tokenizer, [(home / "t0", 1.0)], allow_other_model=True)


def test_a_new_run_may_start_from_a_drafter(home: Path, tmp_path: Path) -> None:
    first = prepared(home, tmp_path / "first")
    first.run()
    export = tmp_path / "first" / "export" / "raw"
    second = prepared(home, tmp_path / "second", start_from=export)
    for key, value in first.master.named(first.master.weights).items():
        torch.testing.assert_close(second.denoiser.state_dict()[key], value.bfloat16().float())
    reading = Recipe(**vars(SMALL) | {"feature_layers": (2,)})
    assert prepared(home, tmp_path / "third", reading, start_from=export).denoiser.feature_projection is not None
    with pytest.raises(CheckpointError, match="no denoiser of these layers"):
        prepared(home, tmp_path / "fourth", Recipe(**vars(SMALL) | {"layers": (0,)}), start_from=export)
    with pytest.raises(CheckpointError, match=r"start_from: expected denoiser\.safetensors"):
        prepared(home, tmp_path / "fifth", start_from=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0}, {"steps": 0}, {"rows": 0}, {"anchors": True}, {"accumulate": 1.5}, {"learning_rate": 0.0},
        {"learning_rate": float("nan")}, {"warmup": 1.0}, {"weight_decay": -1}, {"ema_decay": 1.0}, {"dtype": "fp16"},
        {"objective": "best"}, {"parameters": {"node": 3}}, {"layers": ()}, {"held_out": -1}, {"fuse": 1},
    ],
    ids=str,
)  # fmt: skip
def test_recipes_that_mean_nothing_are_refused(options: dict) -> None:
    with pytest.raises(InputError, match="expected"):
        Recipe(**options)


def test_layers_out_of_range_and_no_corpus_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers: expected indices in \[0, 3\), got \[3\]"):
        prepared(home, tmp_path, Recipe(**vars(SMALL) | {"layers": (0, 3)}))
    target, tokenizer = target_of(home / "target")
    with pytest.raises(InputError, match="corpus: expected at least one"):
        prepare(SMALL, tmp_path, target, tokenizer, [])
    with pytest.raises(InputError, match="weights > 0"):
        prepare(SMALL, tmp_path, target, tokenizer, [(home / "t0", 0.0)])
    with pytest.raises(CorpusError, match="neither"):
        prepare(SMALL, tmp_path, target, tokenizer, [(tmp_path / "none", 1.0)])


def test_option_texts(tmp_path: Path) -> None:
    assert parse_layers("--layers", "0-2,5") == (0, 1, 2, 5)
    assert parse_corpus("a:65") == (Path("a"), 65.0)
    assert parse_corpus("a") == (Path("a"), 1.0)
    (tmp_path / "a:3").mkdir()
    assert parse_corpus(f"{tmp_path}/a:3") == (tmp_path / "a:3", 1.0)
    assert parse_parameter("nodes=15") == ("nodes", 15)
    assert parse_parameter("form=softplus") == ("form", "softplus")
    for bad in (lambda: parse_layers("--layers", "x"), lambda: parse_layers("--layers", "3-1"),
                lambda: parse_corpus("a:x"), lambda: parse_parameter("nodes")):  # fmt: skip
        with pytest.raises(InputError, match="expected"):
            bad()
