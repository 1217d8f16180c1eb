"""A drafter goes on past its own context, on the last tokens, and its cache is rebuilt seldom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Drafter, Observation
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.drafters.windowed import WindowedDrafter, fit_context
from specdiff.errors import InputError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.types import BestFirst, Budget, Chain, Draft, Siblings
from support.drafting import VOCAB, ask, llama

CONTEXT, GAMMA = 16, 3
BUDGET = Budget(gamma=GAMMA, shape=Siblings((2, 2, 1)))
WIDTH = 32


def denoiser(features: tuple[int, ...] = ()) -> MarginalDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = BlockCausalDenoiser.from_target(
            llama(1), draft_vocab=torch.arange(0, VOCAB, 2), layers=(0, 1), window=4, feature_layers=features
        )
        if model.feature_projection is not None:
            torch.nn.init.normal_(model.feature_projection.weight, std=0.3)
    return MarginalDrafter(BlockCausalSource(model))


def inner_drafters() -> dict[str, Drafter]:
    return {
        "autoregressive": AutoregressiveDrafter(llama(1), vocab_size=VOCAB),
        "block-causal": denoiser(),
        "block-causal with features": denoiser((0, 1)),
    }


def states(drafter: Drafter, ids: Sequence[int]) -> Tensor | None:
    """Stand-ins for the target's hidden states, one row a position."""
    if not drafter.feature_layers:
        return None
    generator = torch.Generator().manual_seed(5)
    return torch.randn(200, WIDTH * len(drafter.feature_layers), generator=generator)[: len(ids)]


def fresh(drafter: Drafter, text: list[int], start: int, seed: int) -> Draft:
    """The draft of a new session that is shown the text from ``start`` on."""
    session = drafter.open(1)
    features = states(drafter, text[:-1])
    if features is not None:
        features = features[start:]
    session.observe([Observation(row=0, start=0, tokens=tuple(text[start:-1]), accepted=0, features=features)])
    return session.propose([ask(0, text[start:], BUDGET, seed=seed)])[0]


@pytest.mark.parametrize("prompt", [2, 15, 16, 40])
@pytest.mark.parametrize("kind", list(inner_drafters()))
def test_drafts_equal_those_of_a_fresh_drafter_on_the_window(kind: str, prompt: int) -> None:
    inner = inner_drafters()[kind]
    session = WindowedDrafter(inner, context=CONTEXT).open(2)
    text = [(7 * i * i + 3) % VOCAB for i in range(prompt)]
    seen = states(inner, text[:-1])
    session.observe([Observation(row=1, start=0, tokens=tuple(text[:-1]), accepted=0, features=seen)])
    starts = []
    for step in range(14):
        (draft,) = session.propose([replace(ask(0, text, BUDGET, seed=step), row=1)])
        start = session._windows[1].start
        starts.append(start)
        assert len(text) - start + GAMMA <= CONTEXT
        expected = fresh(inner, text, start, step)
        assert draft.tree.tokens.tolist() == expected.tree.tokens.tolist()
        assert draft.law is not None
        assert expected.law is not None
        torch.testing.assert_close(draft.law.rows, expected.law.rows, atol=1e-5, rtol=1e-4)
        new = [int(draft.tree.tokens[0]), 5] if step % 2 else [9]
        old = len(text)
        text += new
        after = states(inner, text[:-1])
        after = None if after is None else after[old - 1 :]
        session.observe([Observation(row=1, start=old, tokens=tuple(new), accepted=len(new) - 1, features=after)])
    moves = sum(a != b for a, b in itertools.pairwise(starts))
    assert moves <= 14 * 1.5 / (CONTEXT - GAMMA - CONTEXT * 3 // 4) + 1  # not every round
    if prompt >= 15:
        assert moves >= 1


def test_rounds_between_moves_read_only_what_is_new() -> None:
    session = WindowedDrafter(AutoregressiveDrafter(llama(1), vocab_size=VOCAB), context=32).open(1)
    text = list(range(30))
    passes = []
    for token in range(16):
        before = session.passes
        session.propose([ask(0, text, Budget(gamma=2, shape=Chain()))])
        passes.append(session.passes - before)
        text.append(token)
    # two passes a round, and one more where the window has moved and its text is read anew
    assert passes == [2, 3, 2, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 3]


def test_rewind_reaches_before_and_into_the_window() -> None:
    inner = AutoregressiveDrafter(llama(1), vocab_size=VOCAB)
    session = WindowedDrafter(inner, context=CONTEXT).open(1)
    text = list(range(40))
    session.propose([ask(0, text, BUDGET)])
    start = session._windows[0].start
    for length in (start + 4, start, 2):
        text = [*text[:length], *(1, 2, 3)]
        session.rewind(0, length)
        (draft,) = session.propose([ask(0, text, BUDGET, seed=length)])
        expected = fresh(inner, text, session._windows[0].start, length)
        assert draft.tree.tokens.tolist() == expected.tree.tokens.tolist()


@pytest.mark.parametrize("length", [1, 3, 6, 9, 12])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_block_causal_drafter_goes_on_from_where_it_was_rewound_to(length: int, asked_before: bool) -> None:
    inner = denoiser((0, 1))
    session = inner.open(1)
    text = list(range(3, 15))
    seen = states(inner, text)
    assert seen is not None
    session.observe([Observation(row=0, start=0, tokens=tuple(text[:5]), accepted=0, features=seen[:5])])
    if asked_before:
        session.propose([ask(0, text[:6], BUDGET)])
    session.observe([Observation(row=0, start=6, tokens=tuple(text[6:]), accepted=0, features=seen[5:11])])
    session.rewind(0, length)
    text = [*text[:length], 40, 41, 42]
    session.observe(
        [
            Observation(
                row=0, start=length, tokens=(40, 41, 42), accepted=0, features=states(inner, text)[length - 1 : -1]
            )
        ]
    )
    (draft,) = session.propose([ask(0, text, BUDGET)])
    expected = fresh(inner, text, 0, 0)
    assert draft.law is not None
    assert expected.law is not None
    torch.testing.assert_close(draft.law.rows, expected.law.rows, atol=1e-5, rtol=1e-4)


def test_a_window_leaves_room_for_the_widest_draft() -> None:
    windowed = WindowedDrafter(NgramDrafter(vocab_size=VOCAB), context=8)
    assert windowed.max_gamma is None
    assert WindowedDrafter(denoiser(), context=8).max_gamma == 4
    assert WindowedDrafter(denoiser(), context=4).max_gamma == 3
    (draft,) = windowed.open(1).propose([ask(0, [1] * 30, Budget(gamma=50, shape=BestFirst(7)))])
    assert len(draft.tree) == 0  # one token of text is left, which repeats nothing
    (draft,) = windowed.open(1).propose([ask(0, [1] * 30, Budget(gamma=2, shape=BestFirst(7)))])
    assert draft.tree.tokens.tolist() == [1, 1]


def test_only_contexts_that_are_too_short_are_windowed() -> None:
    inner = NgramDrafter(vocab_size=VOCAB)
    assert fit_context(inner, None, target_context=100) is inner
    assert fit_context(inner, 100, target_context=100) is inner
    wrapped = fit_context(inner, 99, target_context=100)
    assert isinstance(wrapped, WindowedDrafter)
    assert (wrapped.context, wrapped.keep) == (99, 74)
    assert isinstance(fit_context(inner, 99, target_context=None), WindowedDrafter)


@pytest.mark.parametrize("options", [{"context": 1}, {"context": 8, "keep": 8}, {"context": 8, "keep": 0}])
def test_settings_that_leave_no_room_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        WindowedDrafter(NgramDrafter(vocab_size=VOCAB), **options)
