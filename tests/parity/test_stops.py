"""Row 6: EOS, stop ids and stop strings at every offset, for every budget and gamma, end texts as plain decoding does.

The target recites an endless text, so that any token may be made the end; drafts are right always, never, every second
time or at random. Expected values come from a few lines that know no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import DraftRequest
from specdiff.records import Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import FinishReason, StopOptions, cut_at_stop
from specdiff.testing import ScriptedDrafter, TableTarget
from specdiff.types import Budget, Chain, Extra

V = 30
EOS = V - 1
# strings of one to three characters, some empty, so that stop strings begin and end inside of tokens
PIECES = [
    "ab",
    "c",
    "",
    "de",
    "f",
    "gh",
    "ijk",
    "l",
    "m",
    "",
    "no",
    "p",
    "q",
    "rst",
    "u",
    "vw",
    "x",
    "yz",
    "A",
    "BC",
    "D",
    "EF",
    "G",
    "",
    "HI",
    "J",
    "KL",
    "M",
    "N",
    "<eos>",
]
OFFSETS = range(1, 22)
BUDGETS = range(1, 21)


def text_of(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def counting_target(*, eos: bool) -> TableTarget:
    """After token t comes t + 1, after the last the first."""
    table = torch.zeros(V, V, V)
    for token in range(V):
        table[:, token, (token + 1) % V] = 1
    return TableTarget(table, eos_ids=(EOS,) if eos else ())


@dataclass(frozen=True)
class Case:
    """One row: the request, and what plain decoding makes of it."""

    request: Request
    tokens: list[int]
    text: str
    finish: FinishReason


def plainly(first: int, stop: StopOptions, *, eos: bool) -> tuple[list[int], FinishReason]:
    """Plain decoding of the counting target, token by token."""
    new: list[int] = []
    while True:
        new.append((first + 1 + len(new)) % V)
        if eos and new[-1] == EOS and not stop.ignore_eos:
            return new, FinishReason.EOS
        if new[-1] in stop.stop_ids:
            return new, FinishReason.STOP_ID
        if any(s in text_of(new) for s in stop.stop_strings):
            return new, FinishReason.STOP_STRING
        if len(new) == stop.max_new_tokens:
            return new, FinishReason.LENGTH


def cases(kind: str) -> list[Case]:
    """Every offset of the end times every budget."""
    made = []
    for offset in OFFSETS:
        for budget in BUDGETS:
            first = (EOS - offset) % V if kind == "eos" else (offset * 7) % V
            end = (first + offset) % V
            strings: tuple[str, ...] = ()
            if kind == "string":  # two tokens' worth and a half, wherever that begins
                around = text_of([(end - 2) % V, (end - 1) % V, end])
                strings = (around[-4:-1] or around, "never")
            stop = StopOptions(
                max_new_tokens=budget,
                stop_ids=[end] if kind == "id" else (),
                stop_strings=strings,
                include_stop=offset % 2 == 0,
            )
            tokens, finish = plainly(first, stop, eos=kind == "eos")
            text = cut_at_stop(text_of(tokens), strings, include_stop=stop.include_stop)
            request = Request(
                prompt=torch.tensor([0, first]), stop=stop, sampling=SamplingOptions(), decode=text_of, index=len(made)
            )
            made.append(Case(request, tokens, text, finish))
    return made


def drafter() -> ScriptedDrafter:
    """Right always, never, every second time, or at random, in turn by row."""
    right: list[Callable[[int], bool]] = [
        lambda at: True,
        lambda at: False,
        lambda at: at % 2 == 0,
        lambda at: hash((at, 77)) % 3 != 0,
    ]

    def script(request: DraftRequest) -> list[int]:
        last, at = int(request.prefix[-1]), len(request.prefix)
        is_right = right[request.row % len(right)]
        return [(last + 1 + i + (0 if is_right(at + i) else 5)) % V for i in range(request.budget.gamma)]

    return ScriptedDrafter(script, vocab_size=V)


QUICK = (0, 1, 2, 4, 7, 16)
"""0 is plain decoding by the loop itself."""


@pytest.mark.parametrize(
    "gammas",
    [
        QUICK,
        pytest.param(tuple(g for g in range(1, 17) if g not in QUICK), marks=pytest.mark.proof),
    ],
    ids=["quick", "rest"],
)
@pytest.mark.parametrize("kind", ["eos", "id", "string"])
def test_ends_are_those_of_plain_decoding(kind: str, gammas: Sequence[int], figure: Callable[..., None]) -> None:
    rows = cases(kind)
    assert {c.finish for c in rows} == {
        FinishReason.LENGTH,
        {
            "eos": FinishReason.EOS,
            "id": FinishReason.STOP_ID,
            "string": FinishReason.STOP_STRING,
        }[kind],
    }
    checked = 0
    for gamma in gammas:
        loop = DecodeLoop(
            counting_target(eos=kind == "eos"),
            drafter() if gamma else None,
            [c.request for c in rows],
            budget=Budget(gamma=max(gamma, 1), shape=Chain()),
        )
        for _ in loop.run():
            pass
        for case, row in zip(rows, loop.rows, strict=True):
            where = f"gamma {gamma}, budget {case.request.stop.max_new_tokens}, prompt {case.request.prompt.tolist()}"
            assert row.new_tokens == case.tokens, where
            assert row.finish is case.finish, where
            got = cut_at_stop(
                text_of(row.new_tokens), case.request.stop.stop_strings, include_stop=case.request.stop.include_stop
            )
            assert got == case.text, where
            totals = Totals.of(row.rounds)  # usage: nothing that was cut off is counted
            assert totals.tokens == len(case.tokens), where
            extra = totals.recovered + totals.bonus
            assert totals.accepted + extra == totals.tokens, where
            assert all(r.extra is not None for r in row.rounds[:-1]), where
            assert all(r.accepted <= r.committed for r in row.rounds), where
            checked += 1
    covered = {"ends": [kind], "gammas": list(gammas), "budgets": list(BUDGETS), "offsets": list(OFFSETS)}
    figure(6, f"{kind} at every offset x budget x gamma", equal=checked, **covered)


def test_an_end_inside_a_draft_drops_its_extra_token() -> None:
    stop = StopOptions(max_new_tokens=20, stop_ids=[4])
    loop = DecodeLoop(
        counting_target(eos=False),
        drafter(),
        [Request(prompt=torch.tensor([0, 1]), stop=stop)],
        budget=Budget(gamma=8, shape=Chain()),
    )
    commits = [c for round_ in loop.run() for c in round_]
    assert [(c.tokens, c.accepted, c.extra) for c in commits] == [((2, 3, 4), 3, None)]
    stop = StopOptions(max_new_tokens=4)
    loop = DecodeLoop(
        counting_target(eos=False),
        drafter(),
        [Request(prompt=torch.tensor([0, 1]), stop=stop)],
        budget=Budget(gamma=8, shape=Chain()),
    )
    commits = [c for round_ in loop.run() for c in round_]
    assert [(c.tokens, c.accepted, c.extra) for c in commits] == [((2, 3, 4, 5), 3, Extra.BONUS)]


@pytest.mark.parametrize("context", [5, 6, 9])
def test_the_context_is_a_budget_too(context: int) -> None:
    target = counting_target(eos=False)
    target.context = context
    for gamma in (1, 3, 8):
        loop = DecodeLoop(
            target,
            drafter(),
            [Request(prompt=torch.tensor([0, 1, 2]), stop=StopOptions(max_new_tokens=20))],
            budget=Budget(gamma=gamma, shape=Chain()),
        )
        list(loop.run())
        assert loop.rows[0].committed == list(range(context))
        assert loop.rows[0].finish is FinishReason.CONTEXT
