"""The backend in this process: the target's own tokens, its own log-probabilities, no row touched by its neighbours."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.corpus.decoding import DecodingBackend
from specdiff.corpus.draw import draw
from specdiff.corpus.fake import FakeSpec
from specdiff.corpus.folder import row_files
from specdiff.corpus.identity import identify, localise, tables_fingerprint, tokenizer_fingerprint
from specdiff.corpus.make import make_corpus
from specdiff.corpus.manifest import CorpusManifest, PromptRecord, TargetIdentity, read_manifest
from specdiff.corpus.plan import Batching, EncodedPrompt, Sampling, plan_groups
from specdiff.corpus.read import read_corpus
from specdiff.corpus.row import CorpusRow
from specdiff.corpus.writer import RowWriter
from specdiff.errors import DownloadError, NumericsError
from specdiff.hub import Location, model_fingerprint
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from support.tiny_targets import VOCAB, tiny_model

EOS = 7
FAMILIES = ["llama", "mistral", "gemma3_text"]  # full, sliding and mixed attention
PROMPTS = [
    EncodedPrompt(id=f"p{i}", ids=tuple(torch.randint(8, VOCAB, (n,), generator=torch.manual_seed(i)).tolist()))
    for i, n in enumerate((1, 3, 3, 9, 14, 20, 5))
]


def model(family: str = "llama") -> PreTrainedModel:
    made = tiny_model(family)
    assert made.generation_config is not None
    made.generation_config.eos_token_id = [EOS, 11]
    return made


def answers(made: PreTrainedModel, sampling: Sampling, rows: int = 32) -> dict[tuple[str, int], CorpusRow]:
    backend = DecodingBackend(CausalTarget(made), sampling)
    groups = plan_groups(PROMPTS, sampling, Batching(rows=rows))
    found = [row for group in groups for rows_ in backend.answer(group) for row in rows_]
    assert len(found) == len(PROMPTS) * sampling.samples
    return {row.key: row for row in found}


def fresh_logprobs(made: PreTrainedModel, row: CorpusRow) -> torch.Tensor:
    with torch.inference_mode():
        logits = made(torch.tensor([[*row.prompt_ids, *row.ids]])).logits[0].double()
    rows = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(row.ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_generate(family: str) -> None:
    made = model(family)
    found = answers(made, Sampling(temperature=0, max_new_tokens=24))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt.ids])
        out = made.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        expected = out[0, len(prompt.ids) :].tolist()
        row = found[prompt.id, 0]
        assert list(row.ids) == expected
        assert row.finish == ("eos" if expected[-1] in (EOS, 11) else "length")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(samples=3), Sampling(temperature=0.7, top_p=0.8)]
)
def test_logprobs_equal_a_fresh_forward(family: str, sampling: Sampling) -> None:
    made = model(family)
    found = answers(made, Sampling(**{**_fields(sampling), "max_new_tokens": 24}), rows=8)
    for row in found.values():
        assert torch.allclose(torch.tensor(row.logprobs, dtype=torch.float64), fresh_logprobs(made, row), atol=1e-5)
    assert {row.finish for row in found.values()} == {"eos", "length"} or sampling.temperature == 0


def _fields(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "samples", "seed")}


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_rows_do_not_depend_on_the_batch_they_are_in(top_p: float) -> None:
    made, sampling = model(), Sampling(temperature=1.3, top_p=top_p, max_new_tokens=16, samples=2, seed=3)
    alone = answers(made, sampling, rows=1)
    for rows in (5, 14):
        together = answers(made, sampling, rows=rows)
        for key, row in alone.items():
            assert together[key].ids == row.ids
            assert together[key].logprobs == pytest.approx(row.logprobs, abs=1e-5)
    assert answers(made, Sampling(**{**_fields(sampling), "max_new_tokens": 16, "seed": 4})) != alone
    assert alone["p3", 0].ids != alone["p3", 1].ids


def test_an_interrupted_corpus_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    sampling, batching = Sampling(max_new_tokens=12, samples=2), Batching(rows=5)

    class Spec(FakeSpec):
        def open(self, sampling: Sampling) -> DecodingBackend:  # type: ignore[override]
            return DecodingBackend(CausalTarget(made), sampling)

    target = TargetIdentity(
        name="tiny", weights_fingerprint="", tables_fingerprint="", tokenizer_fingerprint="", vocab_size=VOCAB,
        eos_ids=(EOS, 11), dtype="float32",
    )  # fmt: skip
    record = PromptRecord(source={}, count=7, sha256="", left_out=(), chat=False, chat_template_sha256="")
    manifest = CorpusManifest(target=target, prompts=record, sampling=sampling, batching=batching, backend={})
    make_corpus(tmp_path / "whole", PROMPTS, Spec(), manifest)
    append, left = RowWriter.append, 1

    def interrupted(writer: RowWriter, lines: list[bytes]) -> None:
        nonlocal left
        left -= 1
        append(writer, lines)
        if not left:
            raise KeyboardInterrupt

    stops = 0
    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "append", interrupted)
        while True:
            try:
                left = 1
                make_corpus(tmp_path / "pieces", PROMPTS, Spec(), manifest)
                break
            except KeyboardInterrupt:
                stops += 1
    assert stops >= 3
    files = [(tmp_path / name / row_files(tmp_path / "whole")[0].name).read_bytes() for name in ("whole", "pieces")]
    assert files[0] == files[1]


def test_draws_follow_the_law_and_its_filters() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, -3.0]).nan_to_num(neginf=-1e30).repeat(20_000, 1)
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.manual_seed(0))
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(top_p=0.8)):
        law = torch.softmax(logits[0].double() / sampling.temperature, -1)
        if sampling.top_p < 1:
            law = torch.where(law >= law.sort(descending=True).values[1], law, 0.0)
            law /= law.sum()
        tokens, logprobs = draw(logits, uniforms, sampling)
        counts = torch.bincount(tokens, minlength=5) / len(tokens)
        assert torch.allclose(counts.double(), law, atol=0.015)
        assert not counts[law == 0].any()
        # the raw law, whatever was drawn from
        assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6)


def test_extreme_uniforms_draw_tokens_that_have_weight() -> None:
    logits = torch.tensor([[-1e30, 0.0, 0.0, -1e30]]).repeat(3, 1)
    uniforms = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert draw(logits, uniforms, Sampling())[0].tolist() == [1, 2, 2]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0]])
    assert draw(logits, torch.zeros(1, dtype=torch.float64), Sampling(temperature=0))[0].tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(NumericsError, match=r"rows \[1\]"):
        draw(logits, torch.zeros(3, dtype=torch.float64), Sampling())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("target")
    model().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token=f"w{EOS}")
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_fingerprints_are_those_of_the_loaded_model(tmp_path: Path, tied: bool) -> None:
    made = tiny_model("llama", tie_word_embeddings=tied)
    made.save_pretrained(tmp_path)
    expected = target_fingerprint(embedding_table(made), output_table(made))
    assert tables_fingerprint(tmp_path, made.config) == expected


def test_a_hub_id_is_fetched_so_that_it_has_fingerprints(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Location(source="org/tiny", folder=None, name="org/tiny")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(target))
    found = identify(localise(where), tokenizer, dtype="fp32")
    assert (found.name, found.weights_fingerprint) == ("org/tiny", model_fingerprint(target))
    assert (found.vocab_size, found.eos_ids, found.dtype) == (VOCAB, (EOS, 11), "float32")

    def failing(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(DownloadError, match=r"org/tiny.*no route"):
        localise(where)


def test_from_prompts_to_rows_by_command(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "q/{i}", "prompt": "w{20 + i} w{30 + i}"}}\n' for i in range(6)))
    out = tmp_path / "corpus"
    arguments = ["corpus", "make", str(out), "--prompts", str(prompts), "--target", str(target), "-k", "2"]
    arguments += ["-n", "12", "--seed", "9", "--batch", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "12 of 12 rows (12 new" in result.stderr
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    corpus = read_corpus(
        out,
        target_fingerprint=model_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )
    assert corpus.manifests == (read_manifest(out),)
    loaded = model()
    assert corpus.manifests[0].target.tables_fingerprint == target_fingerprint(
        embedding_table(loaded), output_table(loaded)
    )
    assert corpus.manifests[0].prompts.chat
    for row in corpus.rows:
        number = int(row.id.removeprefix("q/"))
        assert row.prompt_ids == (1, 20 + number, 30 + number, 2)
        assert torch.allclose(torch.tensor(row.logprobs, dtype=torch.float64), fresh_logprobs(loaded, row), atol=1e-5)
    # shards by command, on another folder, make the same rows
    for shard in ("2/2", "1/2"):
        again = [*arguments[:2], str(tmp_path / "halves"), *arguments[3:], "--shard", shard]
        assert CliRunner().invoke(app, again).exit_code == 0
    files = [sorted(b"".join(p.read_bytes() for p in row_files(f)).splitlines()) for f in (out, tmp_path / "halves")]
    assert files[0] == files[1]
    assert "0 new" in CliRunner().invoke(app, arguments).stderr
    longest = CliRunner().invoke(app, [*arguments[:-4], "--seed", "9", "--batch", "5"])
    assert "batching.rows was 4, is 5" in str(longest.exception)


def test_prompts_longer_than_the_context_are_left_out_and_named(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "long", "prompt": "' + "w20 " * 600 + '"}\n{"id": "short", "prompt": "w20"}\n')
    arguments = ["corpus", "make", str(tmp_path / "c"), "--prompts", str(prompts), "--target", str(target), "-n", "4"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.exception
    assert read_manifest(tmp_path / "c").prompts.left_out == ("long",)
    assert [row.id for row in read_corpus(tmp_path / "c").rows] == ["short"]
