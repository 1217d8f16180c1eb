"""Each study of ``specdiff repro`` from end to end on a tiny model: trained, measured, killed, resumed, reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdiff.cli.app import app
from specdiff.decoder import load
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.multistep import MultiStepDrafter
from specdiff.errors import InputError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.diffusion.base import Window
from specdiff.repro import rows as row_files
from specdiff.types import Budget, Chain
from support.drafting import ask
from support.tokenizing import byte_level

PROMPTS = [f"{word} {n}" for n in range(5) for word in ("add", "the fox", "sub")]


def run(*arguments: object, ok: bool = True):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert (result.exit_code == 0) == ok, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two corpora of its answers, human text, prompts, and an unaligned drafter."""
    home = tmp_path_factory.mktemp("repro")
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    lines = [{"id": f"p{n}", "task": f"task{n % 2}", "prompt": p, "reference": p * 6} for n, p in enumerate(PROMPTS)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, temperature in (("t0", 0), ("t1", 1)):
        run("corpus", "make", home / name, "--prompts", home / "prompts.jsonl", "--target", home / "target",
            "-t", temperature, "-n", 16, "--dtype", "fp32", "--raw", "--json")  # fmt: skip
    run("repro", "human-text", home / "human.jsonl", "--source", home / "prompts.jsonl", "--library", 0,
        "--target", home / "target")  # fmt: skip
    made = json.loads(run("repro", "unaligned", *training(home), "--target", home / "target", "--unaligned-steps", 3,
                          "--dtype", "fp32").stdout)  # fmt: skip
    assert 0 < made["held_out_loss"]["nll"] < 20
    assert made["held_out"] == 4
    assert len(made["held_out_loss"]["nll_by_offset"]) == 4
    return home


def training(home: Path) -> list[object]:
    return [
        "--human", home / "human.jsonl", "--runs", home / "runs", "--layers", "0-1", "--window", 4, "--rows", 3,
        "--anchors", 4, "--held-out", 4,
    ]  # fmt: skip


def measured(home: Path, out: Path) -> list[object]:
    return ["--prompts", home / "prompts.jsonl", "--limit", 2, "--tokens", 8, "--target", home / "target",
            "--dtype", "fp32", "--out", out]  # fmt: skip


def report_of(out: Path) -> dict:
    assert (out / "table.md").read_text().startswith("# ")
    return json.loads((out / "report.json").read_text())


def same_texts(report: dict) -> None:
    """At temperature 0 every setting's text is plain decoding's."""
    for part in report["measured"]:
        texts: dict[str, set[tuple[int, ...]]] = {}
        for row in part["rows"]:
            if part["header"]["settings"][row["setting"]]["temperature"] == 0:
                texts.setdefault(row["prompt"], set()).add(tuple(row["tokens"]))
        assert all(len(found) == 1 for found in texts.values())


def test_diffuspec_is_killed_and_goes_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = home / "runs" / "unaligned" / "export" / "ema"
    arguments = ["repro", "diffuspec", "--drafter", drafter, "--steps", "1,2,4", *measured(home, tmp_path)]
    add, added = row_files.RowFile.add, []

    def until_killed(self, key, row) -> None:
        if len(added) == 7:
            raise MemoryError("killed")
        added.append(key)
        add(self, key, row)

    monkeypatch.setattr(row_files.RowFile, "add", until_killed)
    run(*arguments, ok=False)
    assert not (tmp_path / "report.json").exists()
    before = (tmp_path / "rows.jsonl").read_bytes()
    monkeypatch.setattr(row_files.RowFile, "add", add)
    run(*arguments)
    assert (tmp_path / "rows.jsonl").read_bytes().startswith(before)
    report = report_of(tmp_path)
    same_texts(report)
    tables = {t["title"]: t["lines"] for t in report["tables"]}
    assert [line["key"] for line in tables["Ablation"]] == ["neither", "cps", "adl", "both", "planner"]
    assert tables["Ablation"][3]["published"] == {"speedup": 3.08, "mat": 6.99, "tau": None}
    assert [line["key"] for line in tables["Denoising steps"]] == ["steps=1", "steps=2", "steps=4"]
    assert {line["label"] for line in tables["By category, CPS and ADL"]} == {"task0", "task1"}
    assert 0 <= tables["CPS in a round"][0]["ours"]["share"] < 1
    assert any("window is 4" in remark for remark in report["remarks"])
    assert any("nats a token on kept-out texts" in remark for remark in report["remarks"])
    part = report["measured"][0]
    assert len(part["runs"]) == 2
    rows = [(r["prompt"], r["setting"]) for r in part["rows"]]
    assert len(rows) == len(set(rows)) == 2 * len(part["header"]["settings"])
    with pytest.raises(InputError, match=r"tokens was 8, is 9"):
        raise run(*arguments, "--tokens", 9, ok=False).exception


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--figure", 2], ["unaligned", "AR-distillation", "streak", "streak over AR"]),
        (["--figure", 7, "--points", "1,2"], ["0 steps", "1 steps", "2 steps", "gain"]),
        (["--study", "corpus"], ["unaligned, task0", "on t0, task1", "on t1, task0", "on all, task1"]),
        (["--study", "gain", "--k", 2], ["unaligned", "streak", "self-selection", "both", "both over unaligned"]),
    ],
    ids=str,
)
def test_studies_that_train(home: Path, tmp_path: Path, options: list, keys: list[str]) -> None:
    corpora = ["--corpus", home / "t0", "--corpus", home / "t1"]
    arguments = ["repro", "specdiff2", *options, *corpora, *training(home), "--steps", 2, "--unaligned-steps", 3,
                 *measured(home, tmp_path)]  # fmt: skip
    run(*arguments)
    report = report_of(tmp_path)
    same_texts(report)
    assert set(keys) <= {line["key"] for table in report["tables"] for line in table["lines"]}
    starts = {facts["start"] for facts in report["training"].values() if "start" in facts}
    assert len(starts) == 1  # one start for all
    recipes = [facts["recipe"] for facts in report["training"].values() if "recipe" in facts]
    assert len({(r["seed"], r["rows"], r["anchors"], r["window"]) for r in recipes}) == 1
    metrics = {p: p.stat().st_mtime_ns for p in (home / "runs").glob("*/checkpoint.pt")}
    run(*arguments)  # finished models and rows are used
    assert metrics == {p: p.stat().st_mtime_ns for p in (home / "runs").glob("*/checkpoint.pt")}
    assert report_of(tmp_path)["measured"] == report["measured"]


def test_distill_spec_is_trained_or_refused_by_name(home: Path, tmp_path: Path) -> None:
    arguments = ["repro", "specdiff2", "--figure", 12, "--corpus", home / "t0", "--corpus", home / "t1",
                 *training(home), "--steps", 2, "--unaligned-steps", 3, *measured(home, tmp_path)]  # fmt: skip
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exit_code == 0:
        keys = {line["key"] for line in report_of(tmp_path)["tables"][0]["lines"]}
        assert {"streak", "DistillSpec, tv", "DistillSpec, jsd", "tv over streak"} <= keys
    else:  # a trainer without target rows
        assert isinstance(result.exception, InputError)
        assert "distill_spec" in str(result.exception)
        assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--figure", 5, "--ks", "1,2", "--draft-temperatures", "1,2"], "K=2, draft T=2"),
        (["--figure", 8, "--denoising", "1,2"], "steps=2"),
        (["--figure", 9, "--denoising", "1,2"], "steps=2"),
        (["--figure", 10, "--gammas", "2,4"], "gamma=4"),
        (["--figure", 11, "--gammas", "2,4", "--denoising", "1,2"], "gamma=4, steps=2"),
        (["--table", 2], "published Qwen2.5-72B, T=0, mean"),
        (["--table", 3, "-t", 0], None),
        (["--table", 4, "-t", 1], None),
    ],
    ids=str,
)
def test_studies_of_decoding(home: Path, tmp_path: Path, options: list, key: str | None) -> None:
    drafter = home / "runs" / "unaligned" / "export" / "ema"
    more = ["--unaligned", drafter] if "--table" in options else []
    run("repro", "specdiff2", *options, "--drafter", drafter, *more, *measured(home, tmp_path))
    report = report_of(tmp_path)
    same_texts(report)
    keys = {line["key"] for table in report["tables"] for line in table["lines"]}
    assert key is None or key in keys
    if options[:2] == ["--table", 3]:
        assert f"{home / 'target'}, T=0, all, gain" in keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "exactly one"),
        (["--figure", 2, "--table", 3], "exactly one"),
        (["--figure", 6], "one of 2, 5, 7, 8, 9, 10, 11, 12"),
        (["--table", 5], "2, 3 or 4"),
        (["--study", "x"], "corpus or gain"),
        (["--figure", 8, "--ks", "1,2"], "option of figure8"),
        (["--figure", 2, "--drafter", "default"], "option of figure2"),
        (["--figure", 10, "--gammas", "4,x"], "different numbers"),
        (["--figure", 10, "--gammas", "5"], "gamma of at most 4"),
        (["--table", 2], "--unaligned"),
        (["--figure", 2, "-t", 0, "-t", 1], "one, but for tables"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(home: Path, tmp_path: Path, options: list, message: str) -> None:
    more = ["--drafter", home / "runs" / "unaligned" / "export" / "ema"] if "10" in map(str, options) else []
    result = run("repro", "specdiff2", *options, *more, *measured(home, tmp_path), ok=False)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert not (tmp_path / "report.json").exists()


@torch.inference_mode()
def test_a_block_causal_denoiser_takes_several_steps(home: Path) -> None:
    """The window filled in part: one dense pass over prefix, last token, filled tokens and masks."""
    pair = load(str(home / "target"), str(home / "runs" / "unaligned" / "export" / "ema"), dtype="fp32", prepack=False)
    inner = getattr(pair.drafter, "inner", pair.drafter)
    source: BlockCausalSource = inner.source  # type: ignore[union-attr]
    denoiser: BlockCausalDenoiser = source.denoiser
    prefix = torch.tensor([5, 9, 11, 7])
    for filled in ([-1, -1, -1, -1], [8, -1, -1, -1], [8, 3, 6, -1], [-1, 3, -1, 2]):
        tokens = torch.tensor([source.mask_id if t < 0 else t for t in filled])
        got = source.open(1).denoise([Window(0, prefix, tokens)])[0]
        rows = torch.cat([prefix, tokens[:-1]])
        is_mask = rows == source.mask_id
        n = prefix.numel() - 1
        mask = torch.ones(n + 4, n + 4, dtype=torch.bool).tril()
        mask[n:, n:] = True
        bias = torch.zeros(n + 4, n + 4).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        embeds = denoiser.embed(rows.masked_fill(is_mask, 0)[None], is_mask[None])
        hidden = denoiser.hidden(embeds, bias, torch.arange(n + 4)[None])
        torch.testing.assert_close(got, denoiser.head(hidden[0, n:]), atol=1e-5, rtol=1e-4)
    session = MultiStepDrafter(source, steps=2).open(1)
    draft = session.propose([ask(0, prefix, Budget(gamma=4, shape=Chain()))])[0]
    assert session.passes == 2
    assert len(draft.tree) == 4
    assert draft.law is not None
    stepped = load(str(home / "target"), str(home / "runs" / "unaligned" / "export" / "ema"), dtype="fp32", steps=4)
    result = stepped.generate("add 1", max_new_tokens=8)
    plain = load(str(home / "target"), "none", dtype="fp32").generate("add 1", max_new_tokens=8)
    assert result.tokens == plain.tokens  # type: ignore[union-attr]
    assert result.totals.drafter_passes > result.totals.rounds  # type: ignore[union-attr]
