"""Counts add up: totals equal an independent recount from the token streams, whatever the drafter does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from specdiff.decode import Commit, DecodeLoop, Request
from specdiff.drafters.base import DraftRequest
from specdiff.records import RoundEvent, Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter, TableTarget
from specdiff.types import Budget, Chain, Extra

V, PROMPT, NEW = 7, [1, 2, 3], 60
TARGET = TableTarget.random(V, seed=3)


def truth() -> list[int]:
    loop = DecodeLoop(TARGET, None, [request()], budget=Budget(gamma=1, shape=Chain()))
    list(loop.run())
    return loop.rows[0].committed


def request() -> Request:
    return Request(prompt=torch.tensor(PROMPT), stop=StopOptions(max_new_tokens=NEW), sampling=SamplingOptions())


def run(
    script: Callable[[DraftRequest], Sequence[int]], gamma: int
) -> tuple[DecodeLoop, list[Commit], list[RoundEvent]]:
    events: list[RoundEvent] = []
    loop = DecodeLoop(
        TARGET,
        ScriptedDrafter(script, vocab_size=V),
        [request()],
        budget=Budget(gamma=gamma, shape=Chain()),
        on_round=events.append,
    )
    return loop, [commit for commits in loop.run() for commit in commits], events


@pytest.mark.parametrize("gamma", [1, 2, 5, 16])
def test_an_oracle_is_accepted_to_the_last_token_flat_against_depth(gamma: int, figure: Callable[..., None]) -> None:
    full = truth()
    loop, _, _ = run(lambda r: full[len(r.prefix) : len(r.prefix) + gamma], gamma)
    totals = Totals.of(loop.rows[0].rounds)
    assert loop.rows[0].committed == full
    assert all(share == 1.0 for share in totals.acceptance_by_position)
    assert totals.rounds == -(-NEW // (gamma + 1)), "every round but the last commits gamma + 1 tokens"
    assert totals.recovered == 0
    shares = totals.acceptance_by_position
    spread = max(shares) - min(shares)
    figure(9, f"oracle, gamma {gamma}", min_oracle_acceptance=min(shares), max_spread_over_depth=spread)


@pytest.mark.parametrize("mask", [(1, 0), (1, 1, 0), (0,), (1, 1, 1, 0, 0)])
def test_totals_equal_a_recount_from_the_streams(mask: tuple[int, ...], figure: Callable[..., None]) -> None:
    full, gamma = truth(), 4

    def script(r: DraftRequest) -> list[int]:
        start = len(r.prefix)
        return [t if mask[(start + i) % len(mask)] else (t + 1) % V for i, t in enumerate(full[start : start + gamma])]

    loop, commits, events = run(script, gamma)
    totals = Totals.of(loop.rows[0].rounds)
    assert loop.rows[0].committed == full
    # the recount looks at proposals and committed text only
    accepted = tokens = 0
    at = len(PROMPT)
    for event, commit in zip(events, commits, strict=True):
        proposal = event.draft.tree.tokens.tolist()
        agreed = 0
        while agreed < len(proposal) and at + agreed < len(full) and proposal[agreed] == full[at + agreed]:
            agreed += 1
        accepted += agreed
        tokens += len(commit.tokens)
        assert list(commit.tokens) == full[at : at + len(commit.tokens)]
        at += len(commit.tokens)
    miscounted = abs(totals.accepted - accepted) + abs(totals.tokens - tokens) + abs(NEW - tokens)
    figure(9, f"tokens counted again, drafts right as {mask}", recounted=tokens, miscounted=miscounted)
    assert not miscounted
    assert totals.accepted + totals.recovered + totals.bonus == NEW
    assert totals.tau == NEW / totals.target_passes
    assert totals.accepted_per_round == accepted / totals.rounds


def test_a_cut_round_counts_only_what_was_committed() -> None:
    full = truth()
    target = TableTarget(TARGET.table, eos_ids=(full[len(PROMPT) + 2],))
    loop = DecodeLoop(
        target,
        ScriptedDrafter(lambda r: full[len(r.prefix) : len(r.prefix) + 8], vocab_size=V),
        [request()],
        budget=Budget(gamma=8, shape=Chain()),
    )
    list(loop.run())
    first_end = next(i for i, t in enumerate(full[len(PROMPT) :]) if t == full[len(PROMPT) + 2]) + 1
    totals = Totals.of(loop.rows[0].rounds)
    assert totals.tokens == len(loop.rows[0].new_tokens) == first_end
    assert loop.rows[0].rounds[-1].extra is None
    assert totals.accepted == first_end


def test_no_rounds_give_zeros() -> None:
    totals = Totals.of([])
    assert (totals.rounds, totals.tau, totals.accepted_per_round, totals.acceptance_by_position) == (0, 0.0, 0.0, ())


def test_rounds_say_what_verified_and_why() -> None:
    loop, _, _ = run(lambda r: [0], 1)
    first = loop.rows[0].rounds[0]
    assert first.rule == "match"
    assert "temperature 0" in first.reason
    assert first.extra in (Extra.RECOVERED, Extra.BONUS)
