"""Prompts from files and data sets, presets, and how a target reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdiff.corpus.identity import encode_prompts, tokenizer_fingerprint
from specdiff.corpus.presets import PRESETS, find_preset
from specdiff.corpus.problems import Broken, BrokenRowError, CorpusError
from specdiff.corpus.prompts import DatasetPart, Prompt, read_jsonl, stream_part, take, take_shares
from specdiff.errors import InputError
from support.tokenizing import byte_level, metaspace


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_files_of_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path / "set.jsonl",
        {"id": "a", "question": "One?"},
        {"id": 7, "question": messages},
        {"question": "No name", "other": 1},
    )
    path.write_text(path.read_text() + "\n   \n")
    assert list(read_jsonl(path, field="question")) == [
        Prompt(id="a", content="One?"),
        Prompt(id="7", content=tuple(messages)),
        Prompt(id="set/3", content="No name"),
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"{", Broken.NOT_JSON),
        (b"[1]", Broken.NOT_OBJECT),
        (b'{"text": "x"}', Broken.MISSING_FIELD),
        (b'{"prompt": 5}', Broken.WRONG_TYPE),
        (b'{"prompt": ["x"]}', Broken.WRONG_TYPE),
        (b'{"prompt": [{"role": "user"}]}', Broken.WRONG_TYPE),
        (b'{"prompt": ""}', Broken.EMPTY_PROMPT),
        (b'{"prompt": "  \\n"}', Broken.EMPTY_PROMPT),
        (b'{"prompt": null}', Broken.EMPTY_PROMPT),
        (b'{"prompt": []}', Broken.EMPTY_PROMPT),
        (b'{"prompt": "x", "id": 1.5}', Broken.WRONG_TYPE),
        (b'{"prompt": "x", "id": ""}', Broken.WRONG_TYPE),
        (b'{"prompt": "\xe9"}', Broken.ENCODING),
        (b'\xef\xbb\xbf{"prompt": "x"}', Broken.BOM),
    ],
)
def test_broken_prompts_are_reported_by_file_and_line(tmp_path: Path, line: bytes, kind: Broken) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(BrokenRowError, match=r"set.jsonl, line 2") as caught:
        list(read_jsonl(path))
    assert caught.value.kind is kind


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="check the path"):
        list(read_jsonl(tmp_path / "none.jsonl"))


class FakeSet:
    """What ``load_dataset(..., streaming=True)`` gives, counting what is read."""

    def __init__(self, rows: Iterator[dict]) -> None:
        self.rows, self.read, self.columns = rows, 0, None

    def select_columns(self, names: list[str]) -> FakeSet:
        self.columns = names
        return self

    def __iter__(self) -> Iterator[dict]:
        for row in self.rows:
            self.read += 1
            yield row


def test_data_sets_are_streamed() -> None:
    rows = FakeSet({"q": f"Q{i // 2}", "input": "" if i % 4 else "with", "pid": i // 2} for i in itertools.count())
    asked: list[object] = []

    def load(*arguments: object, **options: object) -> FakeSet:
        asked.append((arguments, options))
        return rows

    part = DatasetPart(dataset="org/set", config="main", split="test", fields=("q", "input"), id_field="pid", label="s")
    taken = take(stream_part(part, load), skip=1, limit=2)
    assert taken == [Prompt(id="s/1", content="Q1"), Prompt(id="s/2", content="Q2\n\nwith")]
    assert asked == [(("org/set", "main"), {"split": "test", "streaming": True})]
    assert rows.read == 5
    assert rows.columns == ["q", "input", "pid"]


def test_data_sets_that_do_not_fit_are_refused() -> None:
    part = DatasetPart(dataset="org/set", fields=("q",), label="s")
    with pytest.raises(CorpusError, match=r"expected the fields \['q'\], got \['x'\]"):
        list(stream_part(part, lambda *_, **__: [{"x": 1}]))
    with pytest.raises(CorpusError, match="expected text or messages"):
        list(stream_part(part, lambda *_, **__: [{"q": 1}]))

    def failing(*_: object, **__: object) -> list:
        raise ConnectionError("no route")

    with pytest.raises(CorpusError, match=r"cannot be streamed.*no route"):
        list(stream_part(part, failing))


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"install specdiff\[datasets\]"):
        list(stream_part(DatasetPart(dataset="org/set", fields=("q",), label="s")))


def test_presets_are_equal_shares_by_name() -> None:
    names = {part.dataset if not part.data_files else part.data_files[0] for p in PRESETS.values() for part in p.parts}
    assert names == {
        "openai/gsm8k", "tatsu-lab/alpaca", "hf://datasets/livecodebench/code_generation_lite/test.jsonl",
        "toloka/beemo", "openbmb/UltraFeedback",
    }  # fmt: skip
    parts = [[Prompt(id=f"{name}/{i}", content="x") for i in range(60)] for name in "abc"]
    mixed = take_shares(parts, find_preset("specdiff2-qwen").prompts)
    assert [sum(p.id.startswith(name) for p in mixed) for name in "abc"] == [43, 43, 42]
    assert [p.id for p in mixed[:4]] == ["a/0", "b/0", "c/0", "a/1"]
    with pytest.raises(CorpusError, match="part 1 has 60, expected 67"):
        take_shares(parts, 200)
    with pytest.raises(InputError, match="specdiff2-qwen"):
        find_preset("qwen")


def test_names_must_differ_and_something_must_be_left() -> None:
    twice = [Prompt(id="a", content="x"), Prompt(id="b", content="y"), Prompt(id="a", content="z")]
    with pytest.raises(CorpusError, match="'a' twice"):
        take(twice)
    assert len(take(twice, limit=2)) == 2
    with pytest.raises(CorpusError, match="at least one"):
        take(twice, skip=3)
    for options in ({"skip": -1}, {"limit": 0}):
        with pytest.raises(InputError):
            take(twice, **options)


def test_prompts_are_encoded_raw_or_through_the_template() -> None:
    tokenizer = byte_level()
    prompts = [Prompt(id="a", content="The quick"), Prompt(id="b", content="The quick brown fox jumps over the dog")]
    raw, record = encode_prompts(prompts, tokenizer, source={})
    assert [list(p.ids) for p in raw] == [tokenizer(p.content)["input_ids"] for p in prompts]
    assert (record.chat, record.chat_template_sha256, record.count) == (False, "", 2)
    short, cut = encode_prompts(prompts, tokenizer, longest=len(raw[0].ids), source={})
    assert [p.id for p in short] == ["a"]
    assert cut.left_out == ("b",)
    assert cut.sha256 != record.sha256
    with pytest.raises(CorpusError, match="longer than 0 tokens"):
        encode_prompts(prompts, tokenizer, longest=0, source={})
    with pytest.raises(InputError, match="chat"):
        encode_prompts(prompts, tokenizer, chat=True, source={})
    with pytest.raises(InputError, match="chat template for messages"):
        encode_prompts([Prompt(id="m", content=({"role": "user", "content": "x"},))], tokenizer, source={})


def test_a_tokenizer_is_known_by_what_its_ids_mean() -> None:
    assert tokenizer_fingerprint(byte_level()) == tokenizer_fingerprint(byte_level())
    assert tokenizer_fingerprint(byte_level()) != tokenizer_fingerprint(metaspace())
