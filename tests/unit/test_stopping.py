"""Texts end where plain decoding would end them, for the reason it would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from specdiff.decode import DecodeLoop, Request
from specdiff.errors import InputError
from specdiff.stopping import FinishReason, StopCheck, StopOptions, cut_at_stop
from specdiff.testing import TableTarget
from specdiff.types import Budget, Chain

NAN, INF = float("nan"), float("inf")
LETTERS = "abcdefghij"


def spell(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def feed(options: StopOptions, tokens: Sequence[int], **arguments: Any) -> tuple[int, FinishReason | None, StopCheck]:
    check = StopCheck(options, **{"eos_ids": (), "room": None, "decode": spell} | arguments)
    for count, token in enumerate(tokens, 1):
        reason = check.feed(token)
        if reason is not None:
            return count, reason, check
    return len(tokens), None, check


BAD: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1.0, True, "5", None],
    "stop_ids": [None, 5, "ab", [-1], [1.0], [True]],
    "stop_strings": [None, 5, [""], [5], ["a", None], {"a": 1}],
    "include_stop": [1, None, "yes"],
    "ignore_eos": [0, None],
    "criteria": [None, 5, [5], "ab"],
    "max_time": [0, -1, NAN, INF, "1", True],
}


def test_every_option_has_bad_values() -> None:
    assert set(BAD) == {f.name for f in dataclasses.fields(StopOptions)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}: expected .*; "):
        StopOptions(**{name: value})


def test_one_string_is_one_stop_string() -> None:
    assert StopOptions(stop_strings="ab").stop_strings == ("ab",)
    assert StopOptions(stop_strings=["ab", "c", "ab"]).stop_strings == ("ab", "c")


class AtLength(StoppingCriteria):
    """Holds from a number of ids on, prompt included."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        assert scores is None
        self.seen.append(input_ids.tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize(
    ("options", "arguments", "count", "reason"),
    [
        ({}, {}, 6, None),
        ({}, {"eos_ids": (4, 9)}, 4, FinishReason.EOS),
        ({"ignore_eos": True}, {"eos_ids": (4,)}, 6, None),
        ({"ignore_eos": True, "stop_ids": [4]}, {"eos_ids": (4,)}, 4, FinishReason.STOP_ID),
        ({"stop_ids": [9, 2]}, {}, 2, FinishReason.STOP_ID),
        ({"stop_strings": ["de"]}, {}, 4, FinishReason.STOP_STRING),
        ({"stop_strings": ["f", "bcd"]}, {}, 3, FinishReason.STOP_STRING),
        ({"max_new_tokens": 3}, {}, 3, FinishReason.LENGTH),
        ({"max_new_tokens": 3}, {"room": 3}, 3, FinishReason.LENGTH),
        ({"max_new_tokens": 3}, {"room": 2}, 2, FinishReason.CONTEXT),
        ({"criteria": [AtLength(99), AtLength(7)]}, {"prompt": torch.tensor([9, 9])}, 5, FinishReason.CRITERIA),
        # several at the same token: the first in the order of the enumeration
        ({"max_new_tokens": 4, "stop_ids": [4], "stop_strings": "e"}, {"eos_ids": (4,)}, 4, FinishReason.EOS),
        ({"max_new_tokens": 4, "stop_ids": [4], "stop_strings": "e"}, {}, 4, FinishReason.STOP_ID),
        ({"max_new_tokens": 4, "stop_strings": "e", "criteria": [AtLength(4)]}, {}, 4, FinishReason.STOP_STRING),
        ({"max_new_tokens": 4, "criteria": [AtLength(4)]}, {}, 4, FinishReason.CRITERIA),
    ],
)
def test_reasons(options: dict[str, Any], arguments: dict[str, Any], count: int, reason: FinishReason | None) -> None:
    assert feed(StopOptions(**options), [1, 2, 3, 4, 5, 6], **arguments)[:2] == (count, reason)


def test_criteria_see_prompt_and_continuation() -> None:
    criterion = AtLength(5)
    feed(StopOptions(criteria=[criterion]), [1, 2, 3], prompt=torch.tensor([7, 8]))
    assert criterion.seen == [[[7, 8, 1]], [[7, 8, 1, 2]], [[7, 8, 1, 2, 3]]]


def test_time_ends_the_text_with_its_next_token() -> None:
    now = iter([100.0, 101.0, 102.0, 102.5, 102.6])
    assert feed(StopOptions(max_time=2.0), [1, 2, 3, 4], clock=lambda: next(now))[:2] == (3, FinishReason.TIME)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InputError, match=r"stop_strings.*stop_ids"):
        StopCheck(StopOptions(stop_strings="a"), eos_ids=(), room=None)


@pytest.mark.parametrize(
    ("text", "strings", "cut", "included"),
    [
        ("hello world", ["lo"], "hel", "hello"),
        ("hello world", ["world", "o w"], "hell", "hello w"),
        ("hello", ["ell", "el"], "h", "hel"),
        ("hello", ["x"], "hello", "hello"),
        ("", ["x"], "", ""),
    ],
)
def test_text_is_cut_at_the_first_stop_string(text: str, strings: list[str], cut: str, included: str) -> None:
    assert cut_at_stop(text, strings) == cut
    assert cut_at_stop(text, strings, include_stop=True) == included


def test_stop_strings_cost_the_same_for_every_token() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return spell(ids)

    tokens = [n * n % 10 for n in range(3000)]
    options = StopOptions(stop_strings="jjjj", max_new_tokens=5000)
    count, reason, check = feed(options, [*tokens, 9, 9, 9, 9], decode=decode)
    assert (count, reason, check.stop_string) == (3004, FinishReason.STOP_STRING, "jjjj")
    assert max(sizes) <= 64
    assert len(sizes) < 1.2 * count


def test_long_stop_strings_are_found_across_windows() -> None:
    text = [n * n * n % 10 for n in range(500)]
    stop = spell([*text[100:250], 8])  # longer than any window that would be kept without it
    assert spell(text).find(stop) == -1
    assert feed(StopOptions(stop_strings=stop, max_new_tokens=900), [*text, *text[:250], 8, 1])[:2] == (
        751,
        FinishReason.STOP_STRING,
    )


class Faulty(StoppingCriteria):
    """Raises after some tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= 4:
            raise RuntimeError("no ink")
        return torch.tensor([False])


def _bad_decode(ids: Sequence[int]) -> str:
    raise KeyError(ids[-1])


@pytest.mark.parametrize(
    ("stop", "decode", "message"),
    [
        (StopOptions(criteria=[Faulty()], max_new_tokens=9), None, "Faulty raised RuntimeError"),
        (StopOptions(stop_strings="a", max_new_tokens=9), _bad_decode, "the tokenizer raised KeyError"),
    ],
)
def test_a_faulty_criterion_harms_its_own_row_only(stop: StopOptions, decode: Any, message: str) -> None:
    prompt = torch.tensor([1, 2])
    requests = [
        Request(prompt=prompt, stop=stop, decode=decode),
        Request(prompt=prompt, stop=StopOptions(max_new_tokens=9)),
    ]
    target = TableTarget.random(5)
    loop = DecodeLoop(target, None, requests, budget=Budget(gamma=1, shape=Chain()), keep_errors=True)
    list(loop.run())
    assert [row.finish for row in loop.rows] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert isinstance(loop.rows[0].error, InputError)
    assert message in str(loop.rows[0].error)
    assert len(loop.rows[1].new_tokens) == 9
    loop = DecodeLoop(target, None, requests, budget=Budget(gamma=1, shape=Chain()))
    with pytest.raises(InputError, match=message):
        list(loop.run())
