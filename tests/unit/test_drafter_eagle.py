"""The EAGLE drafter on tiny targets: its trees by brute force, its cache, its texts, its passes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Observation
from specdiff.drafters.eagle import EagleDrafter
from specdiff.drafters.growing import grow
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import DrafterError, InputError, PairingError
from specdiff.models.eagle import EagleHead
from specdiff.randomness import RandomStream
from specdiff.testing import TableMarginals
from specdiff.types import (
    EAGLE_TREE,
    BestFirst,
    Budget,
    CausalPaths,
    Chain,
    Draft,
    DynamicTree,
    Provenance,
    Samples,
    Siblings,
    StaticTree,
)
from specdiff.verify.registry import RULES
from support.drafting import PROMPTS, ask, decode, line, llama, plain

SAMPLED = StaticTree(EAGLE_TREE.paths, sampled=True)
PREFIX = [5, 9, 11, 5, 9, 2, 30]
SMALL = 7


def drafter_of(target, *, seed: int = 4) -> EagleDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EagleDrafter(EagleHead(target))


@torch.inference_mode()
def features_of(target, ids) -> Tensor:
    return target.get_decoder()(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def log_q(drafter: EagleDrafter, target, prefix: list[int], path: tuple[int, ...]) -> Tensor:
    """log q [V] after a path: whole passes without a cache, each appending the feature that the last one predicted."""
    features = features_of(target, prefix[:-1])
    tokens = [*prefix[1:], *path]
    for _ in range(len(path)):
        predicted = drafter.head(torch.tensor([tokens[: len(features)]]), features[None])[0, -1:]
        features = torch.cat([features, predicted])
    hidden = drafter.head(torch.tensor([tokens]), features[None])[0, -1]
    return drafter.head.logits(hidden).double().log_softmax(-1)


def propose(drafter: EagleDrafter, target, prefix: list[int], budget: Budget) -> Draft:
    session = drafter.open(1)
    session.observe(
        [Observation(row=0, start=0, tokens=tuple(prefix[:-1]), accepted=0, features=features_of(target, prefix[:-1]))]
    )
    return session.propose([ask(0, prefix, budget)])[0]


def lines_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(line(draft.tree.tokens, draft.tree.parents, n)) for n in range(len(draft.tree))]


def test_the_static_tree_holds_the_most_probable_tokens_by_rank() -> None:
    target = llama(1)
    drafter = drafter_of(target)
    draft = propose(drafter, target, PREFIX, Budget(gamma=5, shape=EAGLE_TREE))
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in EAGLE_TREE.within(5):
        above = tokens[path[:-1]]
        best = log_q(drafter, target, PREFIX, above).argsort(descending=True)
        tokens[path] = (*above, int(best[path[-1]]))
    assert lines_of(draft) == [tokens[path] for path in EAGLE_TREE.within(5)]
    assert len(draft.tree) == 25


@pytest.mark.parametrize(("nodes", "top", "gamma"), [(6, 2, 3), (20, 3, 3), (9, SMALL, 2)])
def test_the_dynamic_tree_is_the_beam_reranked(nodes: int, top: int, gamma: int) -> None:
    target = llama(2, vocab=SMALL)
    drafter = drafter_of(target)
    prefix = [t % SMALL for t in PREFIX]
    draft = propose(drafter, target, prefix, Budget(gamma=gamma, shape=DynamicTree(nodes, top)))
    met: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(gamma):
        children = {}
        for path, score in beam.items():
            row = log_q(drafter, target, prefix, path)
            children |= {(*path, t): score + float(row[t]) for t in row.topk(top).indices.tolist()}
        met |= children
        beam = dict(sorted(children.items(), key=lambda item: -item[1])[:top])
    assert lines_of(draft) == sorted(met, key=lambda path: -met[path])[:nodes]


def test_a_wide_dynamic_tree_is_the_best_of_all_paths() -> None:
    target = llama(2, vocab=SMALL)
    drafter = drafter_of(target)
    prefix = [t % SMALL for t in PREFIX]
    draft = propose(drafter, target, prefix, Budget(gamma=2, shape=DynamicTree(12, SMALL)))
    scores = {}
    for path in itertools.chain(itertools.product(range(SMALL), repeat=1), itertools.product(range(SMALL), repeat=2)):
        scores[path] = sum(float(log_q(drafter, target, prefix, path[:i])[t]) for i, t in enumerate(path))
    assert lines_of(draft) == sorted(scores, key=lambda path: -scores[path])[:12]
    assert propose(drafter, target, prefix, Budget(gamma=2, shape=BestFirst(12))).tree.tokens.tolist() == [
        path[-1] for path in lines_of(draft)
    ]


@pytest.mark.parametrize("shape", [Chain(), SAMPLED, Siblings((3, 2)), Samples(3)])
def test_every_sampled_node_was_drawn_from_the_q_it_records(shape) -> None:
    target = llama(3)
    drafter = drafter_of(target)
    draft = propose(drafter, target, PREFIX, Budget(gamma=4, shape=shape))
    assert draft.law is not None
    for node, path in zip(range(-1, len(draft.tree)), [(), *lines_of(draft)], strict=True):
        if node in draft.tree.parents:
            row = draft.law.rows[draft.law.row_of[node + 1]]
            torch.testing.assert_close(row.double(), log_q(drafter, target, PREFIX, path).exp(), rtol=1e-4, atol=1e-6)
    siblings = set(zip(draft.tree.parents, draft.tree.tokens.tolist(), strict=True))
    assert len(siblings) == len(draft.tree)


@pytest.mark.parametrize(("shape", "gamma"), [(EAGLE_TREE, 5), (DynamicTree(20, 4), 4), (BestFirst(6), 3)])
def test_texts_at_temperature_0_are_the_targets_own(shape, gamma: int) -> None:
    target = llama(1)
    loop, events = decode(target, drafter_of(target), Budget(gamma=gamma, shape=shape), new_tokens=16)
    for row, prompt in zip(loop.rows, PROMPTS, strict=True):
        assert row.new_tokens == plain(target, prompt, 16)
    assert {e.record.rule for e in events} == {"match"}


def test_a_round_makes_as_many_passes_as_the_tree_is_deep() -> None:
    target = llama(1)
    _, events = decode(
        target, drafter_of(target), Budget(gamma=4, shape=DynamicTree(8, 3)), prompts=PROMPTS[:1], new_tokens=30
    )
    full = [e.record.drafter_passes for e in events if e.record.start + 6 < 35]
    assert full
    assert set(full) == {4}


@pytest.mark.parametrize("shape", [EAGLE_TREE, DynamicTree(12, 4), SAMPLED])
def test_drafting_after_many_rounds_equals_drafting_from_scratch(shape) -> None:
    target = llama(6, vocab=SMALL)  # few tokens: trees are accepted often
    drafter = drafter_of(target)
    budget = Budget(gamma=4, shape=shape)
    prompts = [p % SMALL for p in PROMPTS]
    temperature = 0.0 if shape is not SAMPLED else 1.0
    loop, events = decode(target, drafter, budget, prompts=prompts, new_tokens=24, temperature=temperature)
    assert max(e.record.accepted for e in events) >= 2
    compared = 0
    for event in events:
        committed = loop.rows[event.row].committed[: event.record.start]
        if event.record.proposed < 4 or len(committed) < 2 or shape is SAMPLED:
            continue
        again = propose(drafter, target, committed, budget)
        assert lines_of(again) == lines_of(event.draft)
        compared += 1
    if shape is not SAMPLED:
        assert compared > 5
        return
    for event in events:  # what was drawn differs; the q of the root must not
        committed = loop.rows[event.row].committed[: event.record.start]
        if event.draft.law is not None:
            row = event.draft.law.rows[event.draft.law.row_of[0]]
            torch.testing.assert_close(row.double(), log_q(drafter, target, committed, ()).exp(), rtol=1e-3, atol=1e-5)


def test_rewinding_and_asking_again_change_nothing() -> None:
    target = llama(1)
    drafter, budget = drafter_of(target), Budget(gamma=3, shape=DynamicTree(9, 3))
    session = drafter.open(1)
    features = features_of(target, PREFIX[:-1])
    session.observe([Observation(row=0, start=0, tokens=tuple(PREFIX[:-1]), accepted=0, features=features)])
    first = session.propose([ask(0, PREFIX, budget)])[0]
    again = session.propose([ask(0, PREFIX, budget)])[0]
    session.rewind(0, 4)
    short = session.propose([ask(0, PREFIX[:4], budget)])[0]
    assert lines_of(again) == lines_of(first)
    assert lines_of(short) == lines_of(propose(drafter, target, PREFIX[:4], budget))
    assert lines_of(session.propose([ask(0, PREFIX[:4], budget)])[0]) == lines_of(short)


def test_missing_features_are_named() -> None:
    target = llama(1)
    session = drafter_of(target).open(1)
    with pytest.raises(DrafterError, match="features of 6 positions, got 0"):
        session.propose([ask(0, PREFIX, Budget(gamma=2, shape=Chain()))])


def test_a_prompt_of_one_token_gets_an_empty_draft_first() -> None:
    target = llama(1)
    _, events = decode(target, drafter_of(target), Budget(gamma=3, shape=EAGLE_TREE), prompts=[torch.tensor([7])])
    assert events[0].record.nodes == 0
    assert events[1].record.nodes > 0


def test_rules_and_shapes_that_do_not_fit_are_refused() -> None:
    target = llama(1)
    drafter = drafter_of(target)
    with pytest.raises(InputError, match="CausalPaths"):
        drafter.provenance(Budget(gamma=3, shape=CausalPaths()))
    assert drafter.provenance(Budget(gamma=3, shape=SAMPLED)) is Provenance.WITHOUT_REPLACEMENT
    for shape in (EAGLE_TREE, DynamicTree()):
        assert drafter.provenance(Budget(gamma=3, shape=shape)) is Provenance.FIXED
        with pytest.raises(PairingError, match="without_replacement"):
            decode(target, drafter, Budget(gamma=3, shape=shape), rule=RULES["without_replacement"], temperature=1.0)


@pytest.mark.parametrize("paths", [(), ((),), ((1,),), ((0,), (0,)), ((0,), (1, 0)), ((0,), (0, 1)), ((-1,),)])
def test_shapes_with_holes_are_refused(paths) -> None:
    with pytest.raises(InputError, match="paths"):
        StaticTree(paths)


def test_drafters_of_independent_positions_refuse_these_trees() -> None:
    drafter = MarginalDrafter(TableMarginals.random(4, 3))
    for shape in (EAGLE_TREE, DynamicTree()):
        with pytest.raises(InputError, match=type(shape).__name__):
            drafter.provenance(Budget(gamma=3, shape=shape))


def test_a_causal_model_as_its_own_drafter_has_its_static_trees_accepted_to_their_depth() -> None:
    target = llama(1)
    drafter = AutoregressiveDrafter(target, vocab_size=48)
    _, events = decode(target, drafter, Budget(gamma=4, shape=EAGLE_TREE), prompts=PROMPTS[:1], new_tokens=20)
    assert [e.record.accepted for e in events] == [4, 4, 4, 4]


def test_a_causal_model_can_draft_dynamic_trees() -> None:
    target = llama(1)
    drafter = AutoregressiveDrafter(target, vocab_size=48)
    loop, events = decode(target, drafter, Budget(gamma=4, shape=DynamicTree(12, 4)), new_tokens=20)
    for row, prompt in zip(loop.rows, PROMPTS, strict=True):
        assert row.new_tokens == plain(target, prompt, 20)
    assert min(e.record.accepted for e in events if e.record.proposed > 0) >= 1  # the best token is always among them


def test_static_trees_stop_at_the_vocabulary_and_at_tokens_of_probability_zero() -> None:
    tree = StaticTree(((0,), (1,), (2,), (2, 0)))
    logits = torch.tensor([1.0, 0.0, -torch.inf])
    for shape, sizes in ((tree, 3), (StaticTree(tree.paths, sampled=True), 2)):
        grower = grow(logits, Budget(gamma=2, shape=shape), RandomStream(0, "draft"), vocab=None, source="")
        draft = None
        try:
            level = next(grower)
            grower.send(torch.zeros(len(level), 3))
        except StopIteration as finished:
            draft = finished.value
        assert draft is not None
        assert draft.tree.depths.count(1) == sizes
