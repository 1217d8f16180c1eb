"""The bookkeeping around a backend: groups, shards, workers, resuming, and refusing what does not fit together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specdiff.corpus.fake import EOS, VOCAB, FakeSpec
from specdiff.corpus.folder import row_files
from specdiff.corpus.make import Progress, make_corpus
from specdiff.corpus.manifest import MANIFEST, CorpusManifest, PromptRecord, TargetIdentity, read_manifest
from specdiff.corpus.plan import Batching, EncodedPrompt, Sampling, Shard, plan_groups, row_seed
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.read import read_corpus
from specdiff.errors import InputError

PROMPTS = [EncodedPrompt(id=f"p/{i}", ids=tuple(range(1, 3 + i * 7 % 11))) for i in range(25)]
SAMPLING = Sampling(max_new_tokens=12, samples=2, seed=5)
BATCHING = Batching(rows=4, tokens=80)


def manifest(sampling: Sampling = SAMPLING, batching: Batching = BATCHING, **changes: object) -> CorpusManifest:
    target = TargetIdentity(
        name="fake", weights_fingerprint="", tables_fingerprint="", tokenizer_fingerprint="", vocab_size=VOCAB,
        eos_ids=(EOS,), dtype="float32",
    )  # fmt: skip
    prompts = PromptRecord(source={}, count=25, sha256="", left_out=(), chat=False, chat_template_sha256="")
    base = CorpusManifest(target=target, prompts=prompts, sampling=sampling, batching=batching, backend={})
    return replace(base, **changes)  # type: ignore[arg-type]


def make(folder: Path, shard: str = "1/1", workers: int = 1, wanted: CorpusManifest | None = None) -> Progress:
    wanted = wanted or manifest()
    return make_corpus(folder, PROMPTS, FakeSpec(), wanted, shard=Shard.parse(shard), workers=workers)


def lines(folder: Path) -> list[bytes]:
    return sorted(line for path in row_files(folder) for line in path.read_bytes().splitlines())


def test_a_corpus_has_every_row_once(tmp_path: Path) -> None:
    end = make(tmp_path)
    rows = read_corpus(tmp_path).rows
    assert {row.key for row in rows} == {(p.id, s) for p in PROMPTS for s in range(2)}
    assert (end.rows, end.total, end.new_rows) == (50, 50, len(rows))
    assert end.new_tokens == sum(len(row.ids) for row in rows)
    assert {row.finish for row in rows} == {"eos", "length"}
    assert all(row.seed == row_seed(5, row.id, row.sample) for row in rows)
    before = lines(tmp_path)
    assert make(tmp_path).new_rows == 0
    assert lines(tmp_path) == before


def test_groups_are_a_pure_function_and_respect_both_bounds() -> None:
    groups = plan_groups(PROMPTS, SAMPLING, BATCHING)
    assert groups == plan_groups(PROMPTS, SAMPLING, BATCHING)
    assert sorted(job.key for g in groups for job in g) == sorted((p.id, s) for p in PROMPTS for s in range(2))
    for group in groups:
        longest = max(len(job.prompt_ids) for job in group)
        assert len(group) <= 4
        assert len(group) == 1 or len(group) * (longest + 12) <= 80
    assert max(map(len, groups)) == 4
    assert groups != plan_groups(PROMPTS, replace(SAMPLING, seed=6), BATCHING)
    assert plan_groups([], SAMPLING, BATCHING) == []


def test_shards_and_workers_make_the_rows_that_one_process_makes(tmp_path: Path) -> None:
    make(tmp_path / "one")
    for shard in ("3/3", "1/3", "2/3"):
        make(tmp_path / "shards", shard)
    make(tmp_path / "workers", workers=2)
    assert lines(tmp_path / "shards") == lines(tmp_path / "one")
    assert lines(tmp_path / "workers") == lines(tmp_path / "one")
    assert len(row_files(tmp_path / "workers")) == 2
    # machines that share no folder
    for shard in ("1/2", "2/2"):
        make(tmp_path / shard[0], shard)
    both = read_corpus([tmp_path / "1", tmp_path / "2"])
    assert sorted(row.to_line() for row in both.rows) == [line + b"\n" for line in lines(tmp_path / "one")]


def test_another_split_may_finish_what_one_began(tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "mixed", "1/3")
    make(tmp_path / "mixed", "2/2")
    make(tmp_path / "mixed")
    assert lines(tmp_path / "mixed") == lines(tmp_path / "one")


def test_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    make(tmp_path / "small", wanted=manifest(batching=Batching(rows=1)))
    make(tmp_path / "large", wanted=manifest(batching=Batching(rows=50, tokens=10**6)))
    assert lines(tmp_path / "small") == lines(tmp_path / "large")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (manifest(sampling=replace(SAMPLING, seed=6)), "sampling.seed was 5, is 6"),
        (manifest(sampling=replace(SAMPLING, top_p=0.5)), "sampling.top_p"),
        (manifest(batching=Batching(rows=5, tokens=80)), "batching.rows"),
        (manifest(target=replace(manifest().target, weights_fingerprint="x")), "target.weights_fingerprint"),
        (manifest(prompts=replace(manifest().prompts, sha256="x")), "prompts.sha256"),
        (manifest(backend={"name": "other"}), "backend"),
    ],
)
def test_a_corpus_is_continued_with_the_same_settings_only(tmp_path: Path, changed: CorpusManifest, named: str) -> None:
    make(tmp_path)
    before = lines(tmp_path)
    with pytest.raises(CorpusError, match=named):
        make(tmp_path, wanted=changed)
    assert lines(tmp_path) == before


def test_further_versions_are_noted(tmp_path: Path) -> None:
    make(tmp_path)
    make(tmp_path, wanted=manifest(versions=({"torch": "9"},)))
    make(tmp_path, wanted=manifest(versions=({"torch": "9"},)))
    assert [v.get("torch") == "9" for v in read_manifest(tmp_path).versions] == [False, True]


def test_rows_without_a_manifest_or_with_a_damaged_one_are_not_continued(tmp_path: Path) -> None:
    make(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    for broken in ("", "[]", "{}", text.replace('"schema": 1', '"schema": 2'), text.replace('"count"', '"cnt"')):
        (tmp_path / MANIFEST).write_text(broken)
        with pytest.raises(CorpusError, match=MANIFEST):
            make(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(CorpusError, match="has rows but no manifest"):
        make(tmp_path)


def test_broken_and_doubled_rows_stop_a_continuation_by_line(tmp_path: Path) -> None:
    make(tmp_path)
    (path,) = row_files(tmp_path)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole[:3], b"{}\n", *whole[3:]]))
    with pytest.raises(CorpusError, match="line 4: missing field"):
        make(tmp_path)
    path.write_bytes(b"".join([*whole, whole[7]]))
    with pytest.raises(CorpusError, match=r"line 51: duplicate key.*line 8"):
        make(tmp_path)


def test_the_same_shard_does_not_run_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdiff.corpus import folder

    monkeypatch.setattr(folder, "_PATIENCE", 0.05)
    make(tmp_path, "1/2")
    with folder.opened(tmp_path, manifest(), Shard(1, 2)):
        for rival in ("1/2", "1/1", "2/3"):
            with pytest.raises(CorpusError, match=r"another process is running \(shard-0001-of-0002\)"):
                make(tmp_path, rival)
        make(tmp_path, "2/2")  # the other half may
    make(tmp_path)
    assert len(read_corpus(tmp_path).rows) == 50


def test_faults_of_a_backend_are_told(tmp_path: Path) -> None:
    class Spec(FakeSpec):
        def open(self, sampling):
            backend = super().open(sampling)

            class Faulty:
                def answer(self, group):
                    rows = [row for rows in backend.answer(group) for row in rows]
                    yield rows[1:]
                    yield rows[1:]

            return Faulty()

    with pytest.raises(CorpusError, match="came twice"):
        make_corpus(tmp_path, PROMPTS, Spec(), manifest())
    make(tmp_path)  # what it did write stays
    assert len(read_corpus(tmp_path).rows) == 50


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2", "1/99999", "²/3", "1 /2"])
def test_shards_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="shard"):
        Shard.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5}, {"max_new_tokens": 0},
        {"samples": 0}, {"samples": 2.0}, {"seed": -1}, {"temperature": 0, "samples": 2},
    ],
)  # fmt: skip
def test_sampling_that_makes_no_sense_is_refused(options: dict) -> None:
    with pytest.raises(InputError):
        Sampling(**options)


def test_more_workers_than_any_machine_has_are_refused(tmp_path: Path) -> None:
    for workers in (0, 65):
        with pytest.raises(InputError, match="workers"):
            make(tmp_path, workers=workers)


def test_prompts_and_manifest_agree(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="expected the manifest's 25, got 24"):
        make_corpus(tmp_path, PROMPTS[1:], FakeSpec(), manifest())


def test_the_bookkeeping_needs_no_torch() -> None:
    code = "import sys, specdiff.corpus.make, specdiff.corpus.read, specdiff.corpus.stats, specdiff.corpus.specs; "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
