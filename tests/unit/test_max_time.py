"""A limit of seconds: by the caller's clock, between rounds; the tokens are the first of the unlimited text."""

from __future__ import annotations

import pytest
import torch

from specdiff.decoder import SpeculativeDecoder
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.errors import InputError
from specdiff.stopping import FinishReason, StopCheck, StopOptions
from specdiff.testing import ScriptedDrafter, TableMarginals, TableTarget

V = 8
TARGET = TableTarget.random(V, seed=3)
DRAFTERS = {
    "plain": None,
    "marginal": MarginalDrafter(TableMarginals.random(V, 4, seed=4, scale=1.5)),
    "ngram": NgramDrafter(vocab_size=V),
    "scripted": ScriptedDrafter(lambda request: [1, 2, 3], vocab_size=V),
}


class RoundClock:
    """A clock that stands still but for one second a round."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def tick(self, event: object) -> None:
        self.now += 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_limited_text_is_the_first_rounds_of_the_unlimited_one(name, temperature):
    decoder = SpeculativeDecoder(TARGET, DRAFTERS[name], None)
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 9}
    whole = decoder.generate([1, 2, 3], **options)
    clock = RoundClock()
    cut = decoder.generate([1, 2, 3], **options, max_time=3.5, clock=clock, on_round=clock.tick)
    # the hook ticks behind each round, so the fifth is the first that ends after 3.5 seconds
    assert (len(cut.rounds), cut.finish) == (5, FinishReason.TIME)
    assert [r.path for r in cut.rounds] == [r.path for r in whole.rounds[:5]]
    assert cut.tokens == whole.tokens[: sum(r.committed for r in whole.rounds[:5])]
    assert cut.rounds[-1].committed == whole.rounds[4].committed  # time never cuts through a round
    assert whole.finish is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_are_cut_each_at_its_own_round(temperature):
    decoder = SpeculativeDecoder(TARGET, DRAFTERS["marginal"], None)
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 2}
    prompts = [[1, 2], [3], [4, 5, 6]]
    whole, clock = decoder.generate(prompts, **options), RoundClock()
    cut = decoder.generate(prompts, **options, max_time=5.5, clock=clock, on_round=clock.tick)
    assert {g.finish for g in cut} == {FinishReason.TIME}
    for long, short in zip(whole, cut, strict=True):
        assert 0 < len(short.tokens) < len(long.tokens)
        assert long.tokens[: len(short.tokens)] == short.tokens


def test_a_stream_is_cut_as_generate_is():
    decoder = SpeculativeDecoder(TARGET, DRAFTERS["marginal"], None)
    clock, again = RoundClock(), RoundClock()
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 4, "max_time": 2.5}
    pieces = list(decoder.stream([1, 2], **options, clock=clock, on_round=clock.tick))
    whole = decoder.generate([1, 2], **options, clock=again, on_round=again.tick)
    assert pieces[-1].generation == whole
    assert tuple(t for p in pieces for t in p.tokens) == whole.tokens
    assert whole.finish is FinishReason.TIME


def test_the_least_time_gives_one_round_and_plenty_changes_nothing():
    decoder = SpeculativeDecoder(TARGET, DRAFTERS["marginal"], None)
    clock = RoundClock()
    one = decoder.generate([1, 2], max_new_tokens=20, max_time=1e-9)  # no clock: the monotonic one
    assert (len(one.rounds), one.finish) == (1, FinishReason.TIME)
    plenty = decoder.generate([1, 2], max_new_tokens=20, max_time=1e6, clock=clock, on_round=clock.tick)
    assert plenty.tokens == decoder.generate([1, 2], max_new_tokens=20).tokens
    assert plenty.finish is FinishReason.LENGTH


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1"])
def test_what_is_no_time_is_refused(value):
    with pytest.raises(InputError, match="max_time"):
        SpeculativeDecoder(TARGET, None, None).generate([1], max_time=value)


def test_the_clock_is_read_behind_a_rounds_last_token_only():
    reads = []

    def clock() -> float:
        reads.append(len(reads))
        return 10.0 * len(reads)

    check = StopCheck(StopOptions(max_time=1.0), eos_ids=(7,), room=None, prompt=torch.tensor([1]), clock=clock)
    assert check.feed(1, ends_round=False) is None
    assert check.feed(2, ends_round=False) is None
    assert len(reads) == 1  # the start
    assert check.feed(7, ends_round=False) is FinishReason.EOS
    assert check.feed(3) is FinishReason.TIME
