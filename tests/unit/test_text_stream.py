"""Streamed pieces add up to the full decode, without stray replacement characters, at a bounded cost (rows 12, 13)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdiff import detokenizer
from specdiff.detokenizer import TextWindow
from specdiff.text import TextStream, unstable_length

_SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz_script", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    before = detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP
    yield module
    detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = before
    del sys.modules[spec.name]


@pytest.mark.parametrize("seed", [11, 12])
def test_fuzz(fuzz: ModuleType, figure: Callable[..., None], seed: int) -> None:
    failures = fuzz.run(1500, seed)
    figure(12, "streaming text, stop strings, sampling options", cases=1500, failures=len(failures))
    assert not failures, failures[0]


def pieces(tokenizer: Any, ids: Sequence[int], **options: Any) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize(
    "text",
    [
        "日本語のテキスト",
        "a😀b👩\u200d👩\u200d👧c🇩🇪",
        "naïve café — über",
        "ไทย العربية",
        "plain words, no more",
    ],
)
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "python-bytes"])
def test_characters_come_whole(fuzz: ModuleType, text: str, kind: str) -> None:
    tokenizer = fuzz.tokenizers()[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, ids)
    assert "".join(got) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in got)


def test_ascii_is_not_held_back(fuzz: ModuleType) -> None:
    tokenizer = fuzz.tokenizers()["byte-level"]
    ids = tokenizer.encode("one token at a time, please", add_special_tokens=False)
    assert pieces(tokenizer, ids) == [*(tokenizer.decode([i]) for i in ids), ""]


def test_a_replacement_character_of_the_text_is_kept(fuzz: ModuleType) -> None:
    tokenizer = fuzz.tokenizers()["byte-level"]
    broken = tokenizer.encode("é", add_special_tokens=False)[:1]  # the first of two bytes
    ids = [*broken, *tokenizer.encode("x", add_special_tokens=False), *broken]
    assert pieces(tokenizer, ids) == ["", "\ufffdx", "", "\ufffd"]


def test_only_the_first_word_loses_its_space(fuzz: ModuleType) -> None:
    tokenizer = fuzz.tokenizers()["byte-fallback"]
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁world", "<|end|>", "▁test"])
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True) == "the world test"
    # the window may have lost all visible text before the space
    assert "".join(pieces(tokenizer, [tokenizer.convert_tokens_to_ids("<|end|>")] * 90 + ids)) == "the world test"


def test_stop_strings_are_held_back_and_cut(fuzz: ModuleType) -> None:
    tokenizer = fuzz.tokenizers()["plain"]
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "c", "a", "b", "d", "x", "y"])
    assert pieces(tokenizer, ids, stop_strings=["abd"]) == ["", "", "abc", "", "", "", "", "", ""]
    assert pieces(tokenizer, ids, stop_strings="abd", include_stop=True)[3:7] == ["", "", "abd", ""]
    stream = TextStream(tokenizer, stop_strings=["abd", "zz"])
    assert stream.push(ids) == "abc"
    assert stream.stopped == "abd"
    assert (stream.push(ids), stream.finish()) == ("", "")
    # what only looked like the beginning of a stop string comes in the end
    assert pieces(tokenizer, ids[:5], stop_strings=["abd"])[-1] == "ab"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("it", 0),
        ("it ", 1),
        ("it n", 2),
        ("it n'", 3),
        ("it 'v", 3),
        ("it'", 1),
        ("it 've", 0),
        ("it na", 0),
        ("it  ", 2),
        ("it 'rn", 0),
    ],
)
def test_clean_up_holds_what_it_may_change(text: str, held: int) -> None:
    assert unstable_length(text, cleans=True) == held
    assert unstable_length(text, cleans=False) == 0


@pytest.mark.parametrize(("run", "held"), [(1, 1), (3, 3), (5, 3)])
def test_only_as_many_replacements_are_held_as_one_character_has_bytes(run: int, held: int) -> None:
    assert unstable_length("a" + "\ufffd" * run, cleans=False) == held


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "word-piece", "cleaned"])
def test_cost_per_token_is_bounded(fuzz: ModuleType, kind: str) -> None:
    detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = 32, 12
    tokenizer, sizes = fuzz.tokenizers()[kind], []

    class Counted:
        clean_up_tokenization_spaces = tokenizer.clean_up_tokenization_spaces

        def decode(self, ids: Sequence[int], **options: Any) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer.encode("the world's test, in 日本. ", add_special_tokens=False) * 60
    got = pieces(Counted(), ids, stop_strings=["never there"])
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True)
    assert max(sizes) <= 64
    assert sum(sizes) < 40 * len(ids)


def test_a_window_recovers_from_ids_without_text() -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join("x" if i else "" for i in ids)

    window = TextWindow(decode)
    for token in [0] * 2000 + [1] * 100:
        window.push(token)
        window.shrink(0)
    assert window.start + len(window.text) == 100
    assert len(decoded) < 2 * 2100
    assert decoded[-1] <= 64
