"""Streamed pieces add up to the full decode, without stray replacement characters, at a bounded cost (rows 12, 13)."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdiff import detokenizer
from specdiff.decoder import Settings, SpeculativeDecoder
from specdiff.detokenizer import TextWindow
from specdiff.drafters.base import DraftRequest
from specdiff.stopping import StopCheck, StopOptions
from specdiff.testing import ScriptedDrafter
from specdiff.text import TextStream, unstable_length
from specdiff.types import Budget, Chain
from support.tokenizing import TOKENIZERS, ReciteTarget

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


KINDS = (
    "byte-level",
    "byte-fallback",
    "metaspace",
    "word-piece",
    "cleaned",
    "plain",
    "word-end",
    "ctc",
    "no-decoder",
    "python-bytes",
)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_size_add_up_to_the_full_decode(fuzz: ModuleType, kind: str, figure: Callable[..., None]) -> None:
    """Row 13: whatever ids a round commits, the pieces add up, and none has a U+FFFD that the whole text has not."""
    detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = 32, 12
    assert set(KINDS) == set(fuzz.tokenizers())
    tokenizer = fuzz.tokenizers()[kind]
    streams = wrong = stray = 0
    for text in fuzz.TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        full = tokenizer.decode(ids, skip_special_tokens=True)
        for size in range(1, 8):
            stream, got = TextStream(tokenizer), ""
            for at in range(0, len(ids), size):
                got += stream.push(ids[at : at + size])
                stray += "\ufffd" in got and not full.startswith(got)
            got += stream.finish()
            streams += 1
            wrong += got != full
            stray += got.count("\ufffd") > full.count("\ufffd")
    figure(13, kind, tokenizers=[kind], streams=streams, wrong=wrong, stray=stray)
    assert not wrong
    assert not stray


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_rounds_that_end_inside_a_character_show_it_whole(kind: str, figure: Callable[..., None]) -> None:
    """Through the loop: one draft is wrong at ``cut``, so that a round ends with every token in turn."""
    tokenizer = TOKENIZERS[kind]()
    text = "速い🦊は犬👩\u200d👩\u200d👧、naïve 한국어"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = tokenizer.decode(ids, skip_special_tokens=True)
    assert full == text
    script, size = [ids[0], *ids], len(tokenizer)
    blocks: set[int] = set()
    wrong = stray = 0
    for cut in range(1, len(script)):

        def draft(request: DraftRequest, cut: int = cut) -> list[int]:
            at = len(request.prefix)
            tokens = script[at : at + request.budget.gamma]
            return [(t + 1) % size if at + i == cut else t for i, t in enumerate(tokens)]

        budget = Budget(gamma=9, shape=Chain())
        drafter = ScriptedDrafter(draft, vocab_size=size)
        decoder = SpeculativeDecoder(ReciteTarget([script], size), drafter, tokenizer, Settings(budget=budget))
        pieces = list(decoder.stream(script[:1], max_new_tokens=len(ids)))
        ends = list(itertools.accumulate(len(p.tokens) for p in pieces))
        assert cut in ends, "a round ends here"
        blocks |= set(ends)
        wrong += "".join(p.text for p in pieces) != text
        stray += sum("\ufffd" in p.text for p in pieces)
    assert blocks >= set(range(1, len(ids) + 1))
    figure(13, f"rounds of the loop, {kind}", streams=len(ids), wrong=wrong, stray=stray)
    assert not wrong
    assert not stray


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
        ("it 'r", 3),
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


# one word for every replacement of clean-up, and one that only begins like them
CLEANED = ("a n't", "b 'm", "c 's", "d 've", "x 're", "a , b", "a . b", "a ? b", "a ! b", "a ' b", "a 'x")


@pytest.mark.parametrize("text", [*CLEANED, " ".join(CLEANED)])
def test_every_clean_up_is_waited_for(fuzz: ModuleType, text: str) -> None:
    """Character by character, so that every ending of what clean-up looks for has been the end of the text."""
    tokenizer = fuzz.tokenizers()["cleaned"]
    ids = tokenizer.convert_tokens_to_ids(list(text))
    assert tokenizer.unk_token_id not in ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("run", "held"), [(1, 1), (3, 3), (5, 3)])
def test_only_as_many_replacements_are_held_as_one_character_has_bytes(run: int, held: int) -> None:
    assert unstable_length("a" + "\ufffd" * run, cleans=False) == held


@pytest.mark.parametrize("behind", range(7))
def test_a_window_leaves_no_bad_byte_behind(fuzz: ModuleType, behind: int) -> None:
    """Its first byte makes all of the run U+FFFD; a window without that byte would read text, in one of three places.

    The window grows too long ``behind`` tokens behind the run.
    """
    detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = 32, 12
    tokenizer = fuzz.tokenizers()["byte-fallback"]
    run = [f"<0x{byte:02X}>" for byte in b"\xff" + "日本語日本語".encode()]
    tokens = [*"a" * (33 - len(run) - behind), *run, *"abcdxyz"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    stream = TextStream(tokenizer, stop_strings=["語"])
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids)
    assert stream.stopped is None, "the text has no such character"


@pytest.mark.parametrize("before", range(11))
def test_a_window_is_not_anchored_in_replacements(fuzz: ModuleType, before: int) -> None:
    """Inside such a run the end agrees wherever it stops within a character, and disagrees a byte later.

    ``before`` shifts where the window grows too long. Neither check knows of byte tokens here: there is only a decode.
    """
    detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = 32, 12
    tokenizer = fuzz.tokenizers()["byte-fallback"]
    run = [f"<0x{byte:02X}>" for byte in b"\xff" + "é日本語".encode() * 8]
    ids = tokenizer.convert_tokens_to_ids([*"a" * before, *run, "x"])

    class DecodeOnly:
        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            return tokenizer.decode(token_ids, **options)

    stream = TextStream(DecodeOnly(), stop_strings=["語"])
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids) == "a" * before + "\ufffd" * len(run) + "x"
    check = StopCheck(StopOptions(stop_strings=["語"]), eos_ids=(), room=None, decode=tokenizer.decode)
    assert [check.feed(i) for i in ids] == [None] * len(ids)


@pytest.mark.parametrize("token", ["##re", "##test"])
def test_a_window_does_not_begin_inside_a_word(fuzz: ModuleType, token: str) -> None:
    """Decoded alone, the end of a word shows marks that the text does not have; a stop string must not find them."""
    tokenizer = fuzz.tokenizers()["word-piece"]
    ids = [tokenizer.convert_tokens_to_ids("test"), *[tokenizer.convert_tokens_to_ids(token)] * 60]
    stream = TextStream(tokenizer, stop_strings=["##"])
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids) == "test" + token[2:] * 60
    assert stream.stopped is None


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
