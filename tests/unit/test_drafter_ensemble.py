"""Several genuinely different drafters in one tree: whose path was accepted is known, and the budget is shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from specdiff.decoder import Settings, SpeculativeDecoder
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Observation
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.ensemble import EnsembleDraft, EnsembleDrafter, EnsembleSession, Member, merge_drafts
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.errors import InputError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.target import CausalTarget
from specdiff.records import RoundEvent, Totals
from specdiff.testing import ScriptedDrafter, chain
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Siblings
from specdiff.verify.registry import get
from support.drafting import PROMPTS, VOCAB, ask, decode, line, llama, plain


class Tape(ScriptedDrafter):
    """Proposes one chain and remembers what it was asked and told."""

    def __init__(self, name: str, tokens: Sequence[int], layers: tuple[int, ...] = ()) -> None:
        super().__init__(lambda request: tokens, vocab_size=VOCAB)
        self.name, self.feature_layers = name, layers
        self.budgets: list[Budget] = []
        self.seen: list[Observation] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.budgets += [r.budget for r in requests]
        return super().propose(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations


def different_members(target_seed: int = 1) -> list[Member]:
    """A denoiser cut from the target, prompt lookup, and a model that knows half of the target's layers."""
    target = llama(target_seed)
    denoiser = BlockCausalDenoiser.from_target(target, draft_vocab=torch.arange(VOCAB), layers=(0, 1), window=4)
    noisy = llama(target_seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.03)
    return [
        Member(NgramDrafter(vocab_size=VOCAB)),
        Member(MarginalDrafter(BlockCausalSource(denoiser)), share=2.0),
        Member(AutoregressiveDrafter(noisy, vocab_size=VOCAB), share=2.0),
    ]


@pytest.mark.parametrize("rule", [None, "match", "walk", "self_selection"])
@pytest.mark.parametrize("shape", [BestFirst(15), Samples(5)])
def test_the_text_is_the_targets_own_and_counts_equal_a_recount(shape: BestFirst | Samples, rule: str | None) -> None:
    model = llama(1)
    drafter = EnsembleDrafter(different_members())
    loop, events = decode(
        model, drafter, Budget(gamma=4, shape=shape, temperature=0.5), rule=get(rule) if rule else None
    )
    for row, prompt in zip(loop.rows, PROMPTS, strict=True):
        assert row.new_tokens == plain(model, prompt, 30)
    counted: Counter[str] = Counter()
    last = {e.row: e for e in events}
    for event in events:
        if not isinstance(event.draft, EnsembleDraft):
            assert len(event.draft.tree) == 0  # there was no room left for a draft
            continue
        names = event.draft.selected(event.verdict.path)
        assert bool(names) == bool(event.verdict.path)
        if event is not last[event.row]:  # what ends a text is not observed
            counted.update(names)
    session = loop._drafting
    assert isinstance(session, EnsembleSession)
    assert session.selected == counted
    assert session.selected["autoregressive-llama"] > 0
    assert len(session.selected) == 3  # each member was the best one at some time


def test_the_records_count_which_member_was_chosen() -> None:
    """A denoiser, prompt lookup and an autoregressive model, at T = 1: rounds by member add up, and equal a recount."""
    drafter = EnsembleDrafter(different_members(), name="all three")
    budget = Budget(gamma=4, shape=BestFirst(15), temperature=0.5)
    decoder = SpeculativeDecoder(CausalTarget(llama(1)), drafter, None, Settings(budget=budget))
    recount: Counter[str] = Counter()

    def on_round(event: RoundEvent) -> None:
        if isinstance(event.draft, EnsembleDraft):
            names = event.draft.selected(event.verdict.path)
            recount[names[0] if names else "all three"] += 1
            assert event.record.source == (names[0] if names else "all three")

    rounds = []
    for temperature in (0.0, 1.0):
        done = decoder.generate(list(PROMPTS), max_new_tokens=40, temperature=temperature, on_round=on_round)
        assert isinstance(done, list)
        rounds += [r for generation in done for r in generation.rounds]
    totals = Totals.of(rounds)
    assert totals.sources == recount
    assert set(totals.sources) == {"all three", *(m.drafter.name for m in drafter.members)}
    assert sum(totals.sources.values()) == sum(r.source != "" for r in rounds)


def test_every_node_knows_exactly_the_members_that_proposed_it() -> None:
    members = different_members()
    sessions: list[DraftSession] = [m.drafter.open(1) for m in members]
    request = ask(0, [1, 2, 3, 1, 2], Budget(gamma=4, shape=BestFirst(5)))
    drafts = [(m.drafter.name, s.propose([request])[0]) for m, s in zip(members, sessions, strict=True)]
    merged = merge_drafts(drafts, source="all")
    lines = {name: {tuple(line(d.tree.tokens, d.tree.parents, n)) for n in range(len(d.tree))} for name, d in drafts}
    found = [tuple(line(merged.tree.tokens, merged.tree.parents, n)) for n in range(len(merged.tree))]
    assert len(found) == len(set(found))
    assert set(found) == set().union(*lines.values())
    for path, names in zip(found, merged.members, strict=True):
        assert names == tuple(name for name, _ in drafts if path in lines[name])


def test_shared_prefixes_are_credited_to_all_that_proposed_the_whole_path() -> None:
    merged = merge_drafts([("a", chain([1, 2, 3])), ("b", chain([1, 2, 4])), ("none", chain([]))], source="x")
    assert merged.tree.tokens.tolist() == [1, 2, 3, 4]
    assert merged.selected((0, 1)) == ("a", "b")
    assert merged.selected((0, 1, 3)) == ("b",)
    assert merged.selected(()) == ()


@pytest.mark.parametrize(
    ("nodes", "drafts", "shares", "asked"),
    [
        (12, (4, 4, 4), (1.0, 1.0, 2.0), [3, 3, 6]),
        (12, (0, 4, 4), (1.0, 1.0, 2.0), [3, 4, 8]),  # what the first leaves goes on
        (4, (4, 4), (100.0, 0.001), [4]),  # too small a share for one node
    ],
)
def test_the_node_budget_is_shared_out_in_order(
    nodes: int, drafts: Sequence[int], shares: Sequence[float], asked: list[int]
) -> None:
    tapes = [Tape(str(i), list(range(i, i + n))) for i, n in enumerate(drafts)]
    ensemble = EnsembleDrafter([Member(t, s) for t, s in zip(tapes, shares, strict=True)])
    (draft,) = ensemble.open(1).propose([ask(0, [1], Budget(gamma=5, shape=BestFirst(nodes)))])
    assert [b.shape for t in tapes for b in t.budgets] == [BestFirst(n) for n in asked]
    assert [b.gamma for t in tapes for b in t.budgets] == [min(5, n) for n in asked]
    assert len(draft.tree) <= nodes


def test_chains_are_shared_out_and_members_without_that_shape_draft_one() -> None:
    ngram, tape = NgramDrafter(vocab_size=VOCAB), Tape("tape", [7, 8])
    session = EnsembleDrafter([Member(ngram), Member(tape, 3.0)]).open(1)
    (draft,) = session.propose([ask(0, [1, 2, 1], Budget(gamma=2, shape=Samples(8)))])
    assert tape.budgets[0].shape == Samples(7)  # the n-gram was offered 2, and drafted 1
    assert isinstance(draft, EnsembleDraft)
    assert draft.members == (("ngram",), ("ngram",), ("tape",), ("tape",))
    assert draft.provenance is Provenance.FIXED


def test_members_hear_the_features_that_they_asked_for() -> None:
    a, b, c = Tape("a", [1], (2, 5)), Tape("b", [1], (5,)), Tape("c", [1])
    ensemble = EnsembleDrafter([Member(a), Member(b), Member(c)])
    assert ensemble.feature_layers == (2, 5)
    features = torch.arange(2 * 6.0).reshape(2, 6)  # [F, 2 layers * 3]
    ensemble.open(1).observe([Observation(row=0, start=0, tokens=(1, 2), accepted=0, features=features)])
    assert a.seen[0].features is not None
    assert b.seen[0].features is not None
    torch.testing.assert_close(a.seen[0].features, features)
    torch.testing.assert_close(b.seen[0].features, features[:, 3:])
    assert c.seen[0].features is None


def test_limits_and_passes_of_the_members_add_up() -> None:
    members = different_members()
    assert EnsembleDrafter(members).max_gamma is None
    denoiser: Drafter = members[1].drafter
    assert EnsembleDrafter([members[1]]).max_gamma == 4
    session = EnsembleDrafter(members).open(1)
    # a window of 4 bounds the denoiser only
    (draft,) = session.propose([ask(0, [1, 2, 3], Budget(gamma=6, shape=Samples(3)))])
    assert draft.tree.depth == 6
    assert session.passes == 6 + 1
    assert denoiser.max_gamma == 4


@pytest.mark.parametrize("shape", [Chain(), Siblings((2, 1))])
def test_shapes_that_several_drafts_do_not_fit_are_refused(shape: Chain | Siblings) -> None:
    with pytest.raises(InputError, match="ensemble"):
        EnsembleDrafter(different_members()).provenance(Budget(gamma=2, shape=shape))


def test_members_are_checked() -> None:
    with pytest.raises(InputError, match="distinct"):
        EnsembleDrafter([Member(Tape("a", [])), Member(Tape("a", []))])
    with pytest.raises(InputError, match="members"):
        EnsembleDrafter([])
    with pytest.raises(InputError, match="share"):
        EnsembleDrafter([Member(Tape("a", []), 0.0)])
