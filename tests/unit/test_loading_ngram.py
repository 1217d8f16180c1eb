"""``load(ngram=...)`` and ``--ngram``: from a name to the scorer beside the drafter, down to the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.decoder import Settings, load
from specdiff.errors import InputError, PairingError
from specdiff.loading import scoring
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.ngram.mixture import InterpolatedScorer
from specdiff.ngram.prompt import PromptScorer
from specdiff.ngram.train import train
from specdiff.types import Budget, CausalPaths
from support.tiny_targets import tiny_model
from support.tokenizing import byte_level

TOKENIZER = byte_level()
PROMPT = "abcabcabcab"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target and of a denoiser cut from it."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama", vocab_size=len(TOKENIZER)).eval()
    model.save_pretrained(folder / "target")
    TOKENIZER.save_pretrained(folder / "target")
    vocab = torch.arange(0, len(TOKENIZER), 2)
    BlockCausalDenoiser.from_target(model, draft_vocab=vocab, layers=(0,), window=4).save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


@pytest.fixture(scope="module")
def arpa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ngram") / "letters.arpa"
    texts = [TOKENIZER(text)["input_ids"] for text in ("abcabc", "bcabca", "cccab")]
    train(texts, path, tokenizer_fingerprint=tokenizer_fingerprint(TOKENIZER))
    return path


def run(pair: tuple[str, str], *arguments: str):
    command = ["generate", "--target", pair[0], "--drafter", pair[1], "-n", "16", "--dtype", "fp32", *arguments, PROMPT]
    return CliRunner().invoke(app, command)


def test_names_of_models(arpa: Path) -> None:
    size = len(TOKENIZER)
    prompt, both = scoring("prompt", size, TOKENIZER), scoring(f"prompt+{arpa}", size, TOKENIZER)
    trained = scoring(arpa, size, TOKENIZER)
    assert callable(prompt)
    assert callable(both)
    learns = prompt()
    assert isinstance(learns, PromptScorer)
    assert (learns.order, learns.vocab_size) == (3, size)
    assert prompt() is not learns
    assert isinstance(both(), InterpolatedScorer)
    assert trained.order == 3
    with pytest.raises(InputError, match=r"^ngram: expected 'prompt', an ARPA file"):
        scoring("promt", size, TOKENIZER)


def test_a_model_of_other_ids_is_refused(tmp_path: Path) -> None:
    train([(1, 2, 3)], tmp_path / "x.arpa", tokenizer_fingerprint="sha256:other")
    with pytest.raises(PairingError):
        scoring(tmp_path / "x.arpa", len(TOKENIZER), TOKENIZER)


@pytest.mark.parametrize("ngram", ["prompt", "file", "both"])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_text_is_that_of_plain_decoding(pair: tuple[str, str], arpa: Path, ngram: str, keep: int) -> None:
    name = {"prompt": "prompt", "file": str(arpa), "both": f"prompt+{arpa}"}[ngram]
    settings = Settings(budget=Budget(gamma=4, shape=CausalPaths(keep=keep)))
    plain = load(pair[0], "none", dtype="fp32").generate(PROMPT, max_new_tokens=16)
    ours = load(*pair, dtype="fp32", ngram=name, settings=settings).generate(PROMPT, max_new_tokens=16)
    assert ours.tokens == plain.tokens
    assert {record.rule for record in ours.rounds if record.nodes} == {"match"}
    sampled = load(*pair, dtype="fp32", ngram=name, settings=settings).generate(
        PROMPT, max_new_tokens=16, temperature=1.0
    )
    assert {record.rule for record in sampled.rounds if record.nodes} == {"walk"}


@pytest.mark.parametrize("drafter", ["none", "ngram", "ngram+denoiser"])
def test_a_drafter_that_cannot_use_it_is_refused(pair: tuple[str, str], drafter: str) -> None:
    with pytest.raises(InputError, match=r"^ngram: expected a one-step diffusion drafter"):
        load(pair[0], drafter.replace("denoiser", pair[1]), ngram="prompt")


def test_from_the_command_line(pair: tuple[str, str]) -> None:
    texts = {
        tuple(json.loads(run(pair, "--json", *options).stdout)["tokens"])
        for options in (
            (),
            ("--shape", "paths", "--ngram", "prompt"),
            ("--shape", "paths:2,beam=4,mass=0.95,cap=5,weight=0.7", "--ngram", "prompt", "--controller", "adl"),
            ("--shape", "paths:weight=1"),
            ("--controller", "adl"),
        )
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--ngram", "prompt"), "--ngram"),
        (("--ngram", "prompt", "--shape", "chain"), "--ngram"),
        (("--ngram", "prompt", "--shape", "paths:weight=1"), "--ngram"),
        (("--shape", "paths"), "scorer"),
        (("--shape", "paths:0"), "keep"),
        (("--shape", "paths:3,beam=2"), "keep"),
        (("--shape", "paths:mass=2"), "mass"),
        (("--shape", "paths:3,width=2"), "shape"),
        (("--shape", "paths:3,beam"), "shape"),
        (("--controller", "adaptive"), "controller"),
    ],
)
def test_options_that_mean_nothing_are_refused(pair: tuple[str, str], options: tuple[str, ...], name: str) -> None:
    done = run(pair, *options)
    assert isinstance(done.exception, InputError), done.output
    assert str(done.exception).startswith(f"{name}: expected")


def test_a_controller_needs_a_drafter(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(
        app, ["generate", "--target", pair[0], "--drafter", "none", "--controller", "adl", PROMPT]
    )
    assert str(done.exception).startswith("--controller: expected a drafter")
