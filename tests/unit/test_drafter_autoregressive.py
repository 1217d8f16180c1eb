"""The autoregressive drafter: its q is the model's, its cache holds what it should, its passes are as few as said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Observation
from specdiff.errors import UnsupportedModelError
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Shape, Siblings
from support.drafting import PROMPTS, VOCAB, ask, line, llama, logits_after

SHAPES: list[Shape] = [Chain(), Samples(4), Siblings((3, 2, 1)), BestFirst(9)]
TEMPERATURE = 0.7


def budget(shape: Shape, gamma: int = 4) -> Budget:
    return Budget(gamma=gamma, shape=shape, temperature=TEMPERATURE)


def assert_rows_are_the_models(draft: Draft, model: PreTrainedModel, prefix: Sequence[int], size: int = VOCAB) -> None:
    """Every recorded q row equals the softmax of a fresh pass over prefix and path."""
    if draft.law is None:
        return
    for node, row in enumerate(draft.law.row_of, start=-1):
        if row >= 0:
            path = line(draft.tree.tokens, draft.tree.parents, node)
            q = torch.softmax(logits_after(model, [*prefix, *path])[:size].float() / TEMPERATURE, -1)
            torch.testing.assert_close(draft.law.rows[row], q, atol=2e-6, rtol=2e-4)


def accepted(draft: Draft, count: int) -> list[int]:
    """Tokens of the first path, cut to ``count``."""
    path = (
        draft.paths[0]
        if draft.paths
        else next(
            [
                n
                for n in range(len(draft.tree))
                if line(draft.tree.tokens, draft.tree.parents, leaf)[: draft.tree.depths[n]]
                == line(draft.tree.tokens, draft.tree.parents, n)
            ]
            for leaf in range(len(draft.tree))
            if draft.tree.depths[leaf] == draft.tree.depth
        )
    )
    return [int(draft.tree.tokens[n]) for n in path][:count]


def first_round(drafter: AutoregressiveDrafter, prefixes: list[list[int]]):
    session = drafter.open(len(prefixes))
    session.observe([Observation(row=i, start=0, tokens=tuple(p[:-1]), accepted=0) for i, p in enumerate(prefixes)])
    return session


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_the_models_own_also_after_roll_backs_and_in_ragged_batches(shape: Shape) -> None:
    model = llama(1)
    drafter = AutoregressiveDrafter(model, vocab_size=VOCAB)
    prefixes = [p.tolist() for p in PROMPTS]
    session = first_round(drafter, prefixes)
    for step in range(4):
        requests = [ask(i, p, budget(shape, 2 + (i + step) % 3), seed=step) for i, p in enumerate(prefixes)]
        if step == 2:
            del requests[1]  # a row may sit out a round
        drafts = session.propose(requests)
        for r, draft in zip(requests, drafts, strict=True):
            assert draft.tree.depth <= r.budget.gamma
            assert draft.provenance is drafter.provenance(r.budget)
            assert_rows_are_the_models(draft, model, prefixes[r.row])
            # accept all, nothing, or some; then a token that no path holds
            prefixes[r.row] += [*accepted(draft, (step + r.row) % 5), (11 * step + r.row) % VOCAB]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_batch_drafts_what_it_drafts_alone(shape: Shape) -> None:
    model = llama(1)
    drafter = AutoregressiveDrafter(model, vocab_size=VOCAB)
    prefixes = [p.tolist() for p in PROMPTS]
    together = first_round(drafter, prefixes)
    alone = [first_round(drafter, [p]) for p in prefixes]
    for step in range(3):
        batch = together.propose([ask(i, p, budget(shape), seed=step) for i, p in enumerate(prefixes)])
        for i, (draft, session) in enumerate(zip(batch, alone, strict=True)):
            (single,) = session.propose([replace(ask(i, prefixes[i], budget(shape), seed=step), row=0)])
            assert single.tree.tokens.tolist() == draft.tree.tokens.tolist()
            assert single.tree.parents == draft.tree.parents
            prefixes[i] += [*accepted(draft, i + step), 7]


def fed(model: PreTrainedModel) -> list[int]:
    """Grows by the number of rows that each pass feeds."""
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes


def test_a_chain_costs_gamma_passes_and_nothing_is_computed_twice() -> None:
    model = llama(1)
    sizes = fed(model)
    prefix = PROMPTS[2].tolist()
    session = first_round(AutoregressiveDrafter(model, vocab_size=VOCAB), [prefix])
    assert sizes == [len(prefix) - 1]
    for kept, fresh in ((4, 2), (3, 1), (1, 1), (0, 1)):
        sizes.clear()
        (draft,) = session.propose([ask(0, prefix, budget(Chain()))])
        assert len(sizes) == 4
        assert sizes[1:] == [1, 1, 1]
        prefix += [*accepted(draft, kept), 0]
        sizes.clear()
        before = session.passes
        session.propose([ask(0, prefix, budget(Chain(), 1))])
        assert session.passes - before == 1
        # the leaf of a fully accepted chain was never fed; otherwise only the target's own token is new
        assert sizes == [fresh]
        prefix += [1]


def test_a_tree_costs_one_pass_a_level_and_feeds_only_new_nodes() -> None:
    model = llama(1)
    sizes = fed(model)
    session = first_round(AutoregressiveDrafter(model, vocab_size=VOCAB), [[1, 2, 3]])
    sizes.clear()
    (draft,) = session.propose([ask(0, [1, 2, 3], budget(Siblings((3, 2, 2))))])
    assert sizes == [1, 3, 6]
    # the accepted nodes stay in the cache, from whichever branch they came
    leaf = len(draft.tree) - 1
    path = line(draft.tree.tokens, draft.tree.parents, leaf)
    sizes.clear()
    session.propose([ask(0, [1, 2, 3, *path[:2], 5], budget(Chain(), 1))])
    assert sizes == [1]


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdiff.drafters.tree_cache._CHUNK", 4)
    model = llama(1)
    prefixes = [list(range(1, 12)), [3, 4], list(range(20, 29))]
    session = first_round(AutoregressiveDrafter(model, vocab_size=VOCAB), prefixes)
    drafts = session.propose([ask(i, p, budget(Siblings((2, 2)))) for i, p in enumerate(prefixes)])
    for draft, prefix in zip(drafts, prefixes, strict=True):
        assert_rows_are_the_models(draft, model, prefix)
    unread = AutoregressiveDrafter(model, vocab_size=VOCAB).open(3)  # the first proposal may also find all unread
    again = unread.propose([ask(i, p, budget(Siblings((2, 2)))) for i, p in enumerate(prefixes)])
    assert [d.tree.tokens.tolist() for d in again] == [d.tree.tokens.tolist() for d in drafts]


def test_rewind_forgets_what_no_longer_holds() -> None:
    model = llama(1)
    drafter = AutoregressiveDrafter(model, vocab_size=VOCAB)
    prefix = PROMPTS[2].tolist()
    session = first_round(drafter, [prefix])
    session.propose([ask(0, prefix, budget(Samples(3)))])
    changed = [*prefix[:6], 1, 2]
    session.rewind(0, 6)
    (draft,) = session.propose([ask(0, changed, budget(Samples(3)))])
    assert_rows_are_the_models(draft, model, changed)
    session.rewind(0, 0)
    (draft,) = session.propose([ask(0, [8, 9], budget(Samples(3)))])
    assert_rows_are_the_models(draft, model, [8, 9])


def test_the_same_prefix_may_be_asked_for_twice() -> None:
    model = llama(1)
    session = AutoregressiveDrafter(model, vocab_size=VOCAB).open(1)
    first, second = (session.propose([ask(0, [1, 2, 3], budget(BestFirst(9)))])[0] for _ in range(2))
    assert first.tree.tokens.tolist() == second.tree.tokens.tolist()


@pytest.mark.parametrize(("drafter_size", "target_size"), [(VOCAB, VOCAB - 8), (VOCAB, VOCAB + 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_vocabularies_share_their_leading_ids(drafter_size: int, target_size: int, shape: Shape) -> None:
    model = llama(1, vocab=drafter_size)
    drafter = AutoregressiveDrafter(model, vocab_size=target_size)
    common = min(drafter_size, target_size)
    (draft,) = drafter.open(1).propose([ask(0, [1, 2, 3], budget(shape))])
    assert int(draft.tree.tokens.max()) < common
    assert_rows_are_the_models(draft, model, [1, 2, 3], common)
    if draft.law is not None:
        width = draft.law.rows.shape[1]
        assert width == common
        torch.testing.assert_close(draft.law.rows.sum(-1), torch.ones(len(draft.law.rows)))
        if common == target_size:
            assert draft.law.vocab is None
        else:
            assert draft.law.vocab is not None
            assert draft.law.vocab.tolist() == list(range(common))


def test_the_q_of_a_half_precision_model_is_the_law_it_was_drawn_from() -> None:
    model = llama(1, dtype=torch.bfloat16)
    (draft,) = AutoregressiveDrafter(model, vocab_size=VOCAB).open(1).propose([ask(0, [1, 2, 3], budget(Chain()))])
    assert draft.law is not None
    assert draft.law.rows.dtype == torch.float32
    torch.testing.assert_close(draft.law.rows.sum(-1), torch.ones(4))


def test_sliding_windows_see_the_positions_of_a_growing_tree() -> None:
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, sliding_window=3,  # less than the tree is deep
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    prefixes = [p.tolist() for p in PROMPTS]
    session = first_round(AutoregressiveDrafter(model, vocab_size=VOCAB), prefixes)
    for step in range(2):
        wide = budget(Siblings((2, 2, 1, 1, 1, 1)), 6)
        drafts = session.propose([ask(i, p, wide, seed=step) for i, p in enumerate(prefixes)])
        for draft, prefix in zip(drafts, prefixes, strict=True):
            assert_rows_are_the_models(draft, model, prefix)
            leaf = line(draft.tree.tokens, draft.tree.parents, len(draft.tree) - 1)
            prefix += [*leaf, 3]


def test_models_that_cannot_be_rolled_back_are_refused() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.layer_types = ["linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        AutoregressiveDrafter(LlamaForCausalLM(config), vocab_size=8)


def test_provenance_of_each_shape() -> None:
    drafter = AutoregressiveDrafter(llama(1), vocab_size=VOCAB)
    assert [drafter.provenance(budget(s)) for s in SHAPES] == [
        Provenance.CHAIN, Provenance.IID, Provenance.WITHOUT_REPLACEMENT, Provenance.FIXED,
    ]  # fmt: skip
