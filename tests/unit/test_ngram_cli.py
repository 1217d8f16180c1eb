"""``specdiff ngram`` from corpora and texts to files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.corpus.manifest import MANIFEST, CorpusManifest, PromptRecord, TargetIdentity
from specdiff.corpus.plan import Batching, Sampling
from specdiff.corpus.problems import BrokenRowError, CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.errors import InputError
from specdiff.ngram.arpa import ArpaError, read_arpa, read_header
from specdiff.ngram.kneser_ney import estimate
from support.tokenizing import byte_level

ANSWERS = [(5, 6, 7, 9), (5, 6, 8, 9), (5, 6, 7), (8, 6, 7, 9)]
PROMPT = (3, 4)


def run(*arguments: object, error: type[Exception] | None = None, code: int = 0):
    result = CliRunner().invoke(app, ["ngram", *map(str, arguments)])
    if error is None:
        assert result.exit_code == code, (result.output, result.exception)
    else:
        assert isinstance(result.exception, error), (result.output, result.exception)
    return result


def corpus(folder: Path, fingerprint: str, answers: list[tuple[int, ...]] = ANSWERS, name: str = "p") -> Path:
    folder.mkdir()
    manifest = CorpusManifest(
        target=TargetIdentity(
            name="tiny", weights_fingerprint="", tables_fingerprint="", tokenizer_fingerprint=fingerprint,
            vocab_size=100, eos_ids=(9,), dtype="float32",
        ),
        prompts=PromptRecord(
            source={}, count=len(answers), sha256="", left_out=(), chat=False, chat_template_sha256=""
        ),
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8, samples=1, seed=0),
        batching=Batching(rows=1, tokens=1000),
        backend={},
    )  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()))
    rows = [
        CorpusRow(
            id=f"{name}{n}", sample=0, prompt_ids=PROMPT, ids=ids, logprobs=(-1.0,) * len(ids),
            finish="eos" if ids[-1] == 9 else "length", seed=n,
        ).to_line()
        for n, ids in enumerate(answers)
    ]  # fmt: skip
    (folder / "rows-0001-of-0001-w00.jsonl").write_bytes(b"".join(rows))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ngram") / "target"
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_corpus_becomes_a_model_of_its_own_ids(tmp_path: Path) -> None:
    folder, out = corpus(tmp_path / "corpus", "sha256:x"), tmp_path / "out" / "model.arpa"
    result = run("train", folder, "--out", out)
    assert "15 tokens in 4 texts" in result.stderr
    assert "too little text for discounts of n-grams of length" in result.stderr
    header, table = read_arpa(out, tokenizer_fingerprint="sha256:x")
    made = estimate(ANSWERS, order=3)
    assert (header.order, header.counts, header.tokens, header.sequences) == (3, made.table.counts, 15, 4)
    assert header.source == {"files": ["corpus"], "limit": None, "with_prompts": False}
    assert (table.grams[2] == made.table.grams[2]).all()


def test_options_of_a_corpus(tmp_path: Path, target: Path) -> None:
    fingerprint = tokenizer_fingerprint(byte_level())
    first, second = corpus(tmp_path / "a", fingerprint), corpus(tmp_path / "b", fingerprint, [(1, 9)])
    out = tmp_path / "model.arpa"
    made = json.loads(
        run("train", first, second, "-o", out, "--order", 2, "--with-prompts", "--target", target, "--json").stdout
    )
    assert (made["sequences"], made["tokens"], made["order"]) == (5, 15 + 2 + 5 * 2, 2)
    assert made["tokenizer_fingerprint"] == fingerprint
    made = json.loads(run("train", first, second, "-o", out, "--limit", 2, "--json").stdout)
    assert (made["sequences"], made["tokens"], made["order"]) == (2, 8, 3)
    shown = json.loads(run("show", out, "--json").stdout)
    assert shown == {key: value for key, value in made.items() if key not in ("file", "seconds")}
    text = " ".join(run("show", out).stdout.split())
    for words in (
        "order 3",
        "1: 8, 2: ",
        "tokenizer sha256:",
        "8 tokens in 2 texts",
        "discounts 3 0.5000, 1.0000, 1.5000",
    ):
        assert words in text


def test_texts_are_read_by_the_target_s_tokenizer(tmp_path: Path, target: Path) -> None:
    tokenizer = byte_level()
    text, lines, out = tmp_path / "text.txt", tmp_path / "lines.jsonl", tmp_path / "model.arpa"
    text.write_text("\n\nthe fox\nthe dog\n\n \nthe end")
    lines.write_text('{"text": "the lazy dog"}\n\n{"text": "fox"}\n')
    run("train", text, lines, "--out", out, "--target", target)
    paragraphs = ["the fox\nthe dog\n", "the end", "the lazy dog", "fox"]
    ids = [tokenizer(p)["input_ids"] for p in paragraphs]
    header = read_header(out, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    assert (header.sequences, header.tokens) == (4, sum(map(len, ids)))
    assert header.counts == estimate(ids, order=3).table.counts
    lines.write_text('{"story": "fox"}\n')
    assert json.loads(
        run("train", lines, "--out", out, "--target", target, "--field", "story", "--json").stdout
    )["sequences"] == 1  # fmt: skip


def test_refusals(tmp_path: Path, target: Path) -> None:
    folder, out = corpus(tmp_path / "corpus", "sha256:x"), tmp_path / "model.arpa"
    other = corpus(tmp_path / "other", "sha256:y", name="q")
    empty = corpus(tmp_path / "empty", "sha256:x", [])
    broken = corpus(tmp_path / "broken", "sha256:x")
    with (broken / "rows-0001-of-0001-w00.jsonl").open("a") as file:
        file.write("{}\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    text, latin, blank = tmp_path / "text.txt", tmp_path / "latin.txt", tmp_path / "blank.txt"
    text.write_text("the fox")
    latin.write_bytes("é".encode("latin-1"))
    blank.write_text(" \n\n")
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"text": [{"role": "user", "content": "fox"}]}\n{"text": "x"}\n')
    cases = [
        (InputError, "--order: expected an integer >= 1, got 0", [folder, "--order", 0]),
        (InputError, "--limit: expected an integer >= 1, got 0", [folder, "--limit", 0]),
        (InputError, "source: expected a folder or file", [tmp_path / "none"]),
        (InputError, "expected folders of corpora, or files of text", [folder, text, "--target", target]),
        (InputError, "--target: expected whose tokenizer reads the text", [text]),
        (CorpusError, "other: rows of another tokenizer: expected sha256:x, got sha256:y (tiny)", [folder, other]),
        (CorpusError, "corpus: rows of another tokenizer: expected sha256:", [folder, "--target", target]),
        (CorpusError, "corpus: expected at least one row, got none", [empty]),
        (CorpusError, "manifest.json: missing", [bare]),
        (BrokenRowError, "line 5: missing field", [broken]),
        (InputError, "latin.txt: cannot be read as UTF-8 text", [latin, "--target", target]),
        (InputError, "sequences: expected at least one token, got 'none'", [blank, "--target", target]),
        (BrokenRowError, "line 1: missing field: expected 'story'", [chat, "--target", target, "--field", "story"]),
        (InputError, "expected texts, for a tokenizer without a chat template", [chat, "--target", target]),
    ]
    for kind, message, arguments in cases:
        result = run("train", *arguments, "--out", out, error=kind)
        assert message in str(result.exception)
        assert not out.exists()
    run("train", folder, "--out", tmp_path, error=InputError)
    run("show", text, error=ArpaError)
