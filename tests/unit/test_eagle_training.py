"""``specdiff distill-eagle`` from answers to a head that loads and drafts; resumed bit for bit, and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.corpus.problems import CorpusError
from specdiff.decoder import load
from specdiff.distill.eagle import EagleRecipe, measure, prepare_eagle
from specdiff.drafters.eagle import EagleDrafter
from specdiff.errors import CheckpointError, InputError, NumericsError
from specdiff.models.load_target import load_target
from specdiff.objectives.eagle import eagle_loss
from specdiff.train.eagle import EagleBatch, EagleTrainer
from specdiff.train.windows import AnswerRow
from support.tokenizing import byte_level

SMALL = EagleRecipe(steps=6, rows=3, positions=16, held_out=3, evaluate_tokens=8, dtype="fp32", learning_rate=3e-3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder and a file of greedy answers of it."""
    home = tmp_path_factory.mktemp("eagle")
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    generator = torch.Generator().manual_seed(1)
    with (home / "rows.jsonl").open("w") as out:
        for n in range(12):
            prompt = torch.randint(3, len(tokenizer), (1, 3 + n % 4), generator=generator)
            with torch.no_grad():
                text = model.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)[0].tolist()
            length = prompt.shape[1]
            out.write(json.dumps({"id": f"p{n}", "prompt_ids": text[:length], "ids": text[length:]}) + "\n")
    return home


@pytest.fixture
def prepared(home: Path) -> Iterator[object]:
    target, tokenizer = load_target(home / "target", dtype="fp32", device="cpu")

    def make(output: Path, recipe: EagleRecipe = SMALL) -> EagleTrainer:
        return prepare_eagle(recipe, output, target, tokenizer, (), answers=[(home / "rows.jsonl", 1.0)])

    return make


def lines_of(output: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_the_command_makes_a_head_that_drafts(home: Path, tmp_path: Path) -> None:
    command = [
        "distill-eagle", tmp_path / "run", "--answers", home / "rows.jsonl", "--target", home / "target", "--dtype",
        "fp32", "--steps", 3, "--rows", 3, "--held-out", 3, "--evaluate-tokens", 8, "--no-bias", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [str(a) for a in command])
    assert result.exit_code == 0, (result.output, result.exception)
    made = json.loads(result.stdout)
    assert (made["step"], made["steps"]) == (3, 3)
    found = lines_of(tmp_path / "run", "decode")[-1]
    assert found["static, T = 0"]["tau"] >= 1
    assert found["dynamic, T = 0"]["tau"] >= 1
    pair = load(str(home / "target"), made["drafter"], dtype="fp32", device="cpu")
    assert isinstance(pair.drafter, EagleDrafter)
    assert pair.drafter.head.fc.bias is None
    assert pair.generate("the fox", max_new_tokens=6).totals.rounds >= 1
    with pytest.raises(InputError, match="drafter_dtype"):
        load(str(home / "target"), made["drafter"], dtype="fp32", drafter_dtype="bf16", device="cpu")


def test_training_lowers_the_loss(prepared, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, replace(SMALL, steps=60, evaluate_tokens=0, noise=0.0))
    before = float(trainer.loss(0).loss.detach())
    trainer.run()
    assert float(trainer.loss(0).loss.detach()) < before * 0.8


def test_a_resumed_run_equals_an_uninterrupted_one(prepared, tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole")
    whole.run()
    first = prepared(tmp_path / "parts")
    for _ in range(3):
        first._train_step()
    first.checkpoint()
    second = prepared(tmp_path / "parts")
    assert second.step == 3
    second.run()
    for name in ("raw", "ema"):
        one, other = (load_file(tmp_path / run / "export" / name / "model.safetensors") for run in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.equal(a, b) for a, b in zip(whole.master.weights, second.master.weights, strict=True))


def test_the_loss_is_that_of_the_rows_that_drafting_runs_through(prepared, tmp_path: Path) -> None:
    """Against the loss made row by row, without padding, mask or sampling."""
    trainer = prepared(tmp_path, replace(SMALL, positions=0, noise=0.0))
    head, predicted, wanted = trainer.head, [], []
    for row in trainer.stream.rows(4):
        tokens = torch.tensor([row.tokens])
        features = trainer._features(tokens).clone()
        out = head(tokens[:, 1:], features[:, :-1])[0]
        places = range(row.prompt_length - 2, len(row.tokens) - 2)
        predicted.append(out[list(places)])
        wanted.append(features[0, [p + 1 for p in places]])
    predicted, wanted = torch.cat(predicted), torch.cat(wanted)
    expected = eagle_loss(predicted, wanted, head.logits(predicted), head.logits(wanted))
    torch.testing.assert_close(trainer.loss(4).loss, expected.loss, rtol=1e-4, atol=1e-5)


def test_noise_is_uniform_scaled_by_length_and_the_batchs_own(prepared, tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    seen: list[torch.Tensor] = []

    def keep(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        seen.append(features.detach().clone())
        return type(trainer.head).forward(trainer.head, tokens, features)

    trainer.head.forward = keep
    rows = trainer.stream.rows(1)
    clean = trainer._features(EagleBatch.of(rows).tokens)[:, :-1]
    trainer.loss(1)
    trainer.loss(1)
    assert torch.equal(seen[0], seen[1])
    noise = seen[0] - clean
    for b, row in enumerate(rows):
        limit = 0.1 * 512 / len(row.tokens)
        assert float(noise[b].abs().max()) <= limit * 1.001
        assert float(noise[b].abs().max()) > limit * 0.95
        assert abs(float(noise[b].mean())) < limit * 0.15


def test_what_a_batch_learns_begins_at_the_last_prompt_token() -> None:
    batch = EagleBatch.of(
        [
            AnswerRow(id="a", tokens=(1, 2, 3, 4, 5, 6), prompt_length=3),
            AnswerRow(id="b", tokens=(7, 8, 9), prompt_length=1),
        ]
    )
    assert batch.learned.int().tolist() == [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_measuring_is_done_by_the_loop(prepared, home: Path, tmp_path: Path) -> None:
    target, _ = load_target(home / "target", dtype="fp32", device="cpu")
    found = measure(target, prepared(tmp_path).head, [(5, 6, 7)], tokens=9)
    for case in found.values():
        assert case["tau"] * case["rounds"] == pytest.approx(9, abs=1e-3)


def test_bad_input_is_refused(prepared, home: Path, tmp_path: Path) -> None:
    for bad in ({"noise": -1.0}, {"steps": 0}, {"learning_rate": 0.0}, {"dtype": "int8"}, {"positions": -1}):
        with pytest.raises(InputError, match=next(iter(bad))):
            EagleRecipe(**bad)
    trainer = prepared(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no such file"):
        trainer.resume()
    trainer.checkpoint()
    with pytest.raises(InputError, match="noise"):
        prepared(tmp_path / "run", replace(SMALL, noise=0.1))
    target, tokenizer = load_target(home / "target", dtype="fp32", device="cpu")
    with pytest.raises(InputError, match="answers"):
        prepare_eagle(SMALL, tmp_path / "x", target, tokenizer, (), answers=[(tmp_path / "none.jsonl", 1.0)])
    with pytest.raises(CorpusError, match="manifest"):
        prepare_eagle(SMALL, tmp_path / "x", target, tokenizer, [(home / "rows.jsonl", 1.0)])
    assert not (tmp_path / "x").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_changes_nothing(prepared, tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    before = [w.clone() for w in trainer.master.weights]
    with torch.no_grad():
        trainer.head.fc.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="loss is nan at step 0, batch 0"):
        trainer._train_step()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.master.weights, strict=True))
