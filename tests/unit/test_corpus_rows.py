"""Rows and lines: what a line may be, and every way in which it can be broken, named by file and line."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdiff.corpus.manifest import CorpusManifest, PromptRecord, TargetIdentity, adopt_manifest
from specdiff.corpus.plan import Batching, Sampling
from specdiff.corpus.problems import Broken, BrokenRowError, CorpusError
from specdiff.corpus.read import find_sources, read_corpus, scan
from specdiff.corpus.row import CorpusRow, parse_line
from specdiff.corpus.stats import corpus_stats
from specdiff.train.windows import read_rows

GOOD = {
    "id": "a",
    "sample": 0,
    "prompt_ids": [1, 2],
    "ids": [3, 9],
    "logprobs": [-0.5, -1.25],
    "finish": "eos",
    "seed": 7,
}
VOCAB, EOS = 10, (9,)


def line(**changes: object) -> bytes:
    return json.dumps(GOOD | {"id": "b"} | changes).encode() + b"\n"


def without(name: str) -> bytes:
    return json.dumps({k: v for k, v in GOOD.items() if k != name}).encode() + b"\n"


BROKEN: list[tuple[str, bytes, Broken]] = [
    ("not JSON", b"{'id': 1}\n", Broken.NOT_JSON),
    ("cut in the middle, newline there", line()[:40] + b"\n", Broken.NOT_JSON),
    ("zeros from a power cut", b"\0" * 30 + b"\n", Broken.NOT_JSON),
    ("nested too deep", b"[" * 100_000 + b"\n", Broken.NOT_JSON),
    ("two objects", line()[:-1] + line(), Broken.NOT_JSON),
    ("an array", b"[1, 2]\n", Broken.NOT_OBJECT),
    ("null", b"null\n", Broken.NOT_OBJECT),
    ("blank", b"  \n", Broken.BLANK),
    ("byte-order mark", b"\xef\xbb\xbf" + line(), Broken.BOM),
    ("UTF-16", line().decode().encode("utf-16")[:-1], Broken.BOM),
    ("Latin-1", line(id="x").replace(b'"x"', b'"caf\xe9"'), Broken.ENCODING),
    ("a field twice", line()[:-2] + b', "ids": [3]}\n', Broken.REPEATED_FIELD),
    *((f"no {name}", without(name), Broken.MISSING_FIELD) for name in GOOD),
    ("id is a number", line(id=5), Broken.WRONG_TYPE),
    ("ids is a text", line(ids="3 4"), Broken.WRONG_TYPE),
    ("ids holds a float", line(ids=[3, 4.0]), Broken.WRONG_TYPE),
    ("ids holds a bool", line(ids=[3, True]), Broken.WRONG_TYPE),
    ("ids holds null", line(ids=[3, None]), Broken.WRONG_TYPE),
    ("prompt_ids is an object", line(prompt_ids={}), Broken.WRONG_TYPE),
    ("logprobs holds a text", line(logprobs=[-1, "x"]), Broken.WRONG_TYPE),
    ("sample is negative", line(sample=-1), Broken.WRONG_TYPE),
    ("sample is a float", line(sample=1.0), Broken.WRONG_TYPE),
    ("seed is a text", line(seed="0"), Broken.WRONG_TYPE),
    ("empty id", line(id=""), Broken.EMPTY_NAME),
    ("empty prompt", line(prompt_ids=[]), Broken.EMPTY_PROMPT),
    ("empty answer", line(ids=[], logprobs=[]), Broken.EMPTY_ANSWER),
    ("negative id", line(ids=[3, -1]), Broken.NEGATIVE_ID),
    ("negative prompt id", line(prompt_ids=[-4]), Broken.NEGATIVE_ID),
    ("id beyond the vocabulary", line(ids=[3, VOCAB]), Broken.UNKNOWN_ID),
    ("an enormous id", line(prompt_ids=[10**40]), Broken.UNKNOWN_ID),
    ("NaN", line(logprobs=[-1, float("nan")]), Broken.NOT_FINITE),
    ("minus infinity", line(logprobs=[-1, float("-inf")]), Broken.NOT_FINITE),
    ("beyond the range of floats", line(logprobs=[-1, -(10**400)]), Broken.NOT_FINITE),
    ("a probability, not its logarithm", line(logprobs=[0.5, 0.25]), Broken.POSITIVE_LOGPROB),
    ("fewer log-probabilities than ids", line(logprobs=[-1]), Broken.LENGTHS_DIFFER),
    ("more log-probabilities than ids", line(logprobs=[-1, -1, -1]), Broken.LENGTHS_DIFFER),
    ("unknown finish", line(finish="stop"), Broken.FINISH),
    ("eos without an eos id", line(ids=[3, 4]), Broken.FINISH),
    ("the same key again", line(id="a"), Broken.DUPLICATE),
    ("truncated last line", line()[:-9], Broken.TRUNCATED),
    ("last line cut inside a character", line(id="x").replace(b'"x"', b'"\xc3\xa9"')[:8], Broken.TRUNCATED),
]


@pytest.fixture
def folder(tmp_path: Path, manifest: CorpusManifest) -> Path:
    adopt_manifest(tmp_path, manifest)
    return tmp_path


@pytest.fixture
def manifest() -> CorpusManifest:
    return CorpusManifest(
        target=TargetIdentity(
            name="fake", weights_fingerprint="sha256:w", tables_fingerprint="t", tokenizer_fingerprint="sha256:k",
            vocab_size=VOCAB, eos_ids=EOS, dtype="float32",
        ),
        prompts=PromptRecord(source={}, count=3, sha256="", left_out=(), chat=False, chat_template_sha256=""),
        sampling=Sampling(),
        batching=Batching(),
        backend={"name": "fake"},
    )  # fmt: skip


def test_enough_kinds_are_covered() -> None:
    assert len({kind for _, _, kind in BROKEN}) >= 12
    assert set(Broken) - {kind for _, _, kind in BROKEN} == {Broken.UNREADABLE}


@pytest.mark.parametrize(("broken", "kind"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_lines_are_reported_by_file_and_line(folder: Path, broken: bytes, kind: Broken) -> None:
    path = folder / "rows-0001-of-0001-w00.jsonl"
    # whatever follows the broken line is still read
    after = line(id="c") if broken.endswith(b"\n") else b""
    path.write_bytes(line(id="a") + broken + after)
    with pytest.raises(BrokenRowError) as caught:
        read_corpus(folder)
    assert (caught.value.path, caught.value.line, caught.value.kind) == (path, 2, kind)
    assert str(caught.value).startswith(f"{path}, line 2: {kind.value}: ")
    found = list(scan(find_sources(folder)))
    assert [type(x) for x in found] == [CorpusRow, BrokenRowError, *([CorpusRow] if after else [])]
    assert [(e.line, e.kind) for e in corpus_stats(folder).broken] == [(2, kind)]


def test_a_file_that_cannot_be_read_is_reported(folder: Path) -> None:
    (folder / "rows-0001-of-0001-w00.jsonl").mkdir()
    with pytest.raises(BrokenRowError, match="unreadable file"):
        read_corpus(folder)


def test_rows_come_back_as_they_were_written_and_the_trainer_reads_them(tmp_path: Path) -> None:
    row = CorpusRow(
        id="päivä/0", sample=3, prompt_ids=(1,), ids=(4, 5), logprobs=(-1e-9, -3.25), finish="length", seed=2**53 - 1
    )
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row.to_line())
    (back,) = read_corpus(path).rows
    assert back.logprobs == (0.0, -3.25)
    assert b"-0.0" not in row.to_line()
    assert back.to_line() == row.to_line()
    (trained,) = read_rows(path)
    assert (trained.id, trained.tokens, trained.prompt_length) == ("päivä/0", (1, 4, 5), 1)


def test_an_empty_corpus_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="at least one row"):
        read_corpus(folder)
    (tmp_path / "rows-0001-of-0001-w00.jsonl").touch()
    with pytest.raises(CorpusError, match="at least one row"):
        read_corpus([folder])


def test_corpora_of_another_target_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "rows-0001-of-0001-w00.jsonl").write_bytes(line())
    for target in ("sha256:w", "t"):
        assert read_corpus(folder, target_fingerprint=target, tokenizer_fingerprint="sha256:k").rows
    for target in ("sha256:other", "other"):
        with pytest.raises(CorpusError, match="another model"):
            read_corpus(folder, target_fingerprint=target, tokenizer_fingerprint="sha256:k")
        assert read_corpus(
            folder, target_fingerprint=target, tokenizer_fingerprint="sha256:k", allow_other_model=True
        ).rows
    with pytest.raises(CorpusError, match="another tokenizer"):
        read_corpus(folder, tokenizer_fingerprint="sha256:other")
    with pytest.raises(CorpusError, match="another tokenizer"):  # no override for this one
        read_corpus(folder, tokenizer_fingerprint="sha256:other", allow_other_model=True)
    with pytest.raises(CorpusError, match="tokenizer_fingerprint beside it"):
        read_corpus(folder, allow_other_model=True)
    bare = tmp_path / "elsewhere" / "rows.jsonl"
    bare.parent.mkdir()
    bare.write_bytes(line())
    assert read_corpus(bare).manifests == ()
    with pytest.raises(CorpusError, match=r"no manifest.json beside it"):
        read_corpus(bare, target_fingerprint="t")
    with pytest.raises(CorpusError, match="check the path"):
        read_corpus(tmp_path / "nothing")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=7),
    max_leaves=12,
)
objects = st.fixed_dictionaries({}, optional={name: json_values | st.just(GOOD[name]) for name in GOOD})
lines = (
    st.binary(max_size=80)
    | objects.map(lambda o: json.dumps(o).encode())
    | st.tuples(st.integers(0, len(line())), st.binary(max_size=3)).map(
        lambda c: line()[: c[0]] + c[1] + line()[c[0] :]
    )
    | st.tuples(st.integers(0, len(line())), st.integers(0, 255)).map(
        lambda c: line()[: c[0]] + bytes([c[1]]) + line()[c[0] + 1 :]
    )
)


@settings(max_examples=300, deadline=None)
@given(data=lines, newline=st.booleans())
@example(data=b'{"id":"\\ud800","sample":0,"prompt_ids":[1],"ids":[9],"logprobs":[-1],"finish":"eos","seed":0}', newline=True)  # fmt: skip # noqa: E501
def test_any_bytes_are_a_row_or_a_broken_row(data: bytes, newline: bool) -> None:
    data = data.replace(b"\n", b"") + b"\n" * newline
    try:
        row = parse_line(data, Path("f"), 1, vocab_size=VOCAB, eos_ids=EOS)
    except BrokenRowError as error:
        message = str(error)
    else:
        message = "f, line 1: "
        assert parse_line(row.to_line(), Path("f"), 1, vocab_size=VOCAB, eos_ids=EOS).ids == row.ids
        assert len(row.ids) == len(row.logprobs) > 0
    assert message.startswith("f, line 1: ")


@pytest.mark.slow
def test_a_million_lines_are_rows_or_broken_rows() -> None:
    rng, good = random.Random(0), line()
    for _ in range(1_000_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3)).replace(b"\n", b"")
        with contextlib.suppress(BrokenRowError):
            parse_line(bytes(data), Path("f"), 1, vocab_size=VOCAB, eos_ids=EOS)
