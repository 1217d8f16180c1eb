"""With every drafter the text is the target's own; and a drafter that knows the target has everything accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Observation
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.ensemble import EnsembleDrafter, Member
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.drafters.windowed import WindowedDrafter
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.randomness import RandomStream
from specdiff.records import Totals
from specdiff.stopping import StopOptions
from specdiff.testing import TableTarget
from specdiff.types import BestFirst, Budget, Chain, Draft, Extra, Provenance, Samples, Shape, Siblings, TokenTree
from specdiff.verify.registry import get
from support.drafting import PROMPTS, VOCAB, decode, llama, plain

ARGMAX = 1e-4  # a draft temperature at which drawing from q is taking its argmax
NEW = 40


@functools.cache
def expected(row: int) -> list[int]:
    return plain(llama(1), PROMPTS[row], NEW)


def assert_own_text(loop: DecodeLoop) -> None:
    for i, row in enumerate(loop.rows):
        assert row.new_tokens == expected(i)


def denoiser() -> Drafter:
    model = BlockCausalDenoiser.from_target(llama(1), draft_vocab=torch.arange(0, VOCAB, 2), layers=(0, 1), window=6)
    return MarginalDrafter(BlockCausalSource(model))


def other() -> Drafter:
    return AutoregressiveDrafter(llama(2), vocab_size=VOCAB)


def ensemble() -> Drafter:
    return EnsembleDrafter([Member(NgramDrafter(vocab_size=VOCAB)), Member(other()), Member(denoiser())])


DRAFTERS: dict[str, tuple[Callable[[], Drafter], Sequence[Shape]]] = {
    "autoregressive": (other, (Chain(), Samples(3), Siblings((3, 2, 1)), BestFirst(10))),
    "padded": (lambda: AutoregressiveDrafter(llama(2, vocab=VOCAB + 8), vocab_size=VOCAB), (Chain(), BestFirst(10))),
    "n-gram": (lambda: NgramDrafter(vocab_size=VOCAB), (Chain(), BestFirst(10))),
    "windowed": (lambda: WindowedDrafter(other(), context=12), (Chain(), Siblings((3, 2, 1)))),
    "windowed denoiser": (lambda: WindowedDrafter(denoiser(), context=12), (Samples(3), BestFirst(10))),
    "ensemble": (ensemble, (Samples(3), BestFirst(10))),
}


@pytest.mark.parametrize(
    ("kind", "shape"), [(k, s) for k, (_, shapes) in DRAFTERS.items() for s in shapes], ids=lambda x: str(x)
)
def test_the_greedy_text_is_the_targets_own(kind: str, shape: Shape) -> None:
    loop, events = decode(llama(1), DRAFTERS[kind][0](), Budget(gamma=4, shape=shape), new_tokens=NEW)
    assert_own_text(loop)
    assert any(len(e.draft.tree) for e in events)


class Spoiling:
    """Breaks its inner drafter's drafts at a depth that a plan names, round by round; None leaves them whole."""

    def __init__(self, inner: Drafter, plan: Sequence[int | None]) -> None:
        self.inner, self.plan = inner, plan
        self.name, self.vocab_size, self.max_gamma, self.feature_layers = "spoiling", VOCAB, None, ()

    def provenance(self, budget: Budget) -> Provenance:
        return Provenance.FIXED

    def open(self, rows: int) -> SpoilingSession:
        return SpoilingSession(self, self.inner.open(rows), rows)


class SpoilingSession:
    def __init__(self, drafter: Spoiling, inner: DraftSession, rows: int) -> None:
        self._plan, self._inner = drafter.plan, inner
        self._round = [0] * rows

    @property
    def passes(self) -> int:
        return self._inner.passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._spoiled(r.row, d) for r, d in zip(requests, self._inner.propose(requests), strict=True)]

    def _spoiled(self, row: int, draft: Draft) -> Draft:
        depth = self._plan[(self._round[row] + row) % len(self._plan)]
        self._round[row] += 1
        broken = torch.tensor([d == depth for d in draft.tree.depths])
        tokens = torch.where(broken, (draft.tree.tokens + 1) % VOCAB, draft.tree.tokens)
        return Draft(TokenTree(tokens, draft.tree.parents), source="spoiling")

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def rewind(self, row: int, length: int) -> None:
        self._inner.rewind(row, length)


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("shape", [Chain(), Samples(2), Siblings((1,) * 5), BestFirst(8)], ids=str)
def test_the_target_as_its_own_drafter_has_everything_accepted(
    shape: Shape, gamma: int, figure: Callable[..., None]
) -> None:
    oracle = AutoregressiveDrafter(llama(1), vocab_size=VOCAB)
    budget = Budget(gamma=gamma, shape=shape, temperature=ARGMAX)
    rounds = 6
    loop, _ = decode(llama(1), oracle, budget, new_tokens=rounds * (gamma + 1))
    for row in loop.rows:
        assert row.new_tokens == plain(llama(1), row.request.prompt, rounds * (gamma + 1))
        totals = Totals.of(row.rounds)
        figure(9, f"the target as its own drafter, {shape}", min_oracle_acceptance=min(totals.acceptance_by_position))
        assert totals.tau == gamma + 1
        assert totals.acceptance_by_position == (1.0,) * gamma
        assert totals.drafter_passes == rounds * gamma


def test_after_every_roll_back_everything_is_accepted_again() -> None:
    """A cache that is off by one, or stale after a roll-back, would show in the rounds that are left whole."""
    oracle = AutoregressiveDrafter(llama(1), vocab_size=VOCAB)
    plan = [1, None, 3, None, 2, None, None, 4]
    budget = Budget(gamma=4, shape=Chain(), temperature=ARGMAX)
    loop, events = decode(llama(1), Spoiling(oracle, plan), budget, new_tokens=NEW)
    assert_own_text(loop)
    rounds = [0] * len(PROMPTS)
    for event in events:
        depth = plan[(rounds[event.row] + event.row) % len(plan)] if len(event.draft.tree) else None
        rounds[event.row] += 1
        proposed = event.record.proposed
        assert event.record.accepted == (proposed if depth is None or depth > proposed else depth - 1)


ORACLES: dict[str, Callable[[], Drafter]] = {
    "alone": lambda: AutoregressiveDrafter(llama(1), vocab_size=VOCAB),
    "windowed": lambda: WindowedDrafter(AutoregressiveDrafter(llama(1), vocab_size=VOCAB), context=400),
    "in an ensemble": lambda: EnsembleDrafter(
        [Member(NgramDrafter(vocab_size=VOCAB)), Member(AutoregressiveDrafter(llama(1), vocab_size=VOCAB))]
    ),
}


@pytest.mark.parametrize("kind", ORACLES)
def test_acceptance_is_flat_against_depth(kind: str, figure: Callable[..., None]) -> None:
    """From depth 2 to 360 of a text, in rows that start at different depths, whatever the loop did before."""
    prompts = [torch.arange(n) * 7 % VOCAB for n in (10, 60, 163, 300, 2)]
    gamma, rounds = 3, 15
    budget = Budget(gamma=gamma, shape=Chain(), temperature=ARGMAX)
    if kind == "in an ensemble":
        budget = Budget(gamma=gamma, shape=BestFirst(12), temperature=ARGMAX)
    loop, _ = decode(llama(1), ORACLES[kind](), budget, prompts=prompts, new_tokens=rounds * (gamma + 1))
    by_depth: list[float] = []
    for row in loop.rows:
        for first in range(0, rounds, 5):
            some = row.rounds[first : first + 5]
            by_depth.append(sum(r.accepted for r in some) / sum(r.proposed for r in some))
    spread = max(by_depth) - min(by_depth)
    figure(9, f"oracle {kind}", min_oracle_acceptance=min(by_depth), max_spread_over_depth=spread)
    assert min(by_depth) == 1.0


@pytest.mark.parametrize(
    ("shape", "rule"),
    [(Chain(), "ratio"), (Chain(), "block"), (Samples(2), "multi_round"), (Siblings((2, 2, 1)), "without_replacement")],
)
def test_a_draft_from_the_targets_own_law_is_accepted_whole_at_temperature_1(shape: Shape, rule: str) -> None:
    oracle = AutoregressiveDrafter(llama(1), vocab_size=VOCAB)
    loop, events = decode(
        llama(1), oracle, Budget(gamma=3, shape=shape, temperature=1.0), temperature=1.0, rule=get(rule), new_tokens=24
    )
    drafted = [e for e in events if len(e.draft.tree)]
    whole = sum(e.record.accepted == e.record.proposed and e.verdict.extra is Extra.BONUS for e in drafted)
    assert whole >= len(drafted) - 1  # q is p up to rounding, which may cost a round
    assert len(loop.rows[0].rounds) == 6


def test_a_row_of_a_batch_commits_what_it_commits_alone() -> None:
    budget = Budget(gamma=4, shape=Siblings((3, 2, 1)), temperature=0.8)
    together, _ = decode(llama(1), other(), budget, temperature=0.9, new_tokens=NEW)
    for i, prompt in enumerate(PROMPTS):
        alone, _ = decode(llama(1), other(), budget, prompts=[prompt], first=i, temperature=0.9, new_tokens=NEW)
        assert alone.rows[0].new_tokens == together.rows[i].new_tokens


def test_prompt_lookup_accepts_what_a_text_repeats() -> None:
    table = torch.full((8, 8, 8), 1e-9)
    for token in range(8):
        table[:, token, (token + 1) % 8] = 1.0
    request = Request(prompt=torch.arange(24) % 8, stop=StopOptions(max_new_tokens=40))
    budget = Budget(gamma=7, shape=Chain())
    loop = DecodeLoop(TableTarget(table), NgramDrafter(vocab_size=8), [request], budget=budget)
    for _ in loop.run():
        pass
    totals = Totals.of(loop.rows[0].rounds)
    assert totals.tau == 8.0
    assert totals.drafter_passes == 0


def test_a_shorter_draft_is_the_beginning_of_the_whole_window() -> None:
    """Masks see each other, so a window of fewer rows than trained would give other marginals."""
    drafter = denoiser()
    assert isinstance(drafter, MarginalDrafter)

    def rows(gamma: int) -> torch.Tensor:
        session = drafter.source.open(1)
        budget = Budget(gamma=gamma, shape=Chain())
        stream = RandomStream(0, "draft", 0)
        return session.logits([DraftRequest(row=0, prefix=PROMPTS[0], budget=budget, random=stream)])[0]

    for gamma in (1, 3, 5):
        torch.testing.assert_close(rows(gamma), rows(6)[:gamma])
