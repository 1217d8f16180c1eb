"""Prompt lookup finds known repeats, in any shape it supports, with an index that only grows."""

from __future__ import annotations

import random

import pytest

from specdiff.drafters.ngram import NgramDrafter
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Siblings
from support.drafting import ask, line

CHAIN = Budget(gamma=4, shape=Chain())


def propose(text: list[int], budget: Budget = CHAIN, **options: int) -> Draft:
    return NgramDrafter(vocab_size=100, **options).open(1).propose([ask(0, text, budget)])[0]


def paths(draft: Draft) -> list[list[int]]:
    """All nodes as token sequences, in node order."""
    return [line(draft.tree.tokens, draft.tree.parents, n) for n in range(len(draft.tree))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),  # what followed 1 2 3
        ([1, 2, 9, 7, 7, 2, 8, 6, 1, 2], [9, 7, 7, 2]),  # the longer suffix 1 2 wins over the later 2
        ([5, 1, 5, 2, 5, 3, 5], [3, 5, 3, 5]),  # of equal suffixes, the most recent; its end repeats
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_what_followed_the_longest_suffix_is_proposed(text: list[int], expected: list[int]) -> None:
    draft = propose(text)
    assert draft.tree.tokens.tolist() == expected
    assert draft.tree.is_chain
    assert draft.provenance is Provenance.FIXED


def test_suffix_lengths_are_honoured() -> None:
    text = [1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3]
    assert propose(text, longest=3).tree.tokens.tolist()[0] == 9
    assert propose(text, longest=2).tree.tokens.tolist()[0] == 7
    assert len(propose([1, 2, 3, 4, 9, 4], shortest=2).tree) == 0


def test_a_tree_holds_longer_suffixes_then_frequent_then_recent_continuations() -> None:
    #        after 1 2: 5 6 (twice), 7 8 (once, the latest); after 2 alone: 9
    text = [1, 2, 5, 6, 0, 1, 2, 5, 6, 0, 2, 9, 9, 0, 1, 2, 7, 8, 0, 1, 2]
    budget = Budget(gamma=2, shape=BestFirst(5))
    draft = propose(text, budget, longest=2)
    assert paths(draft) == [[5], [5, 6], [7], [7, 8], [9]]
    assert paths(propose(text, Budget(gamma=2, shape=BestFirst(2)), longest=2)) == [[5], [5, 6]]
    assert paths(propose(text, budget, longest=2, occurrences=1)) == [[7], [7, 8]]


def test_the_index_of_a_growing_text_equals_a_fresh_one() -> None:
    generator = random.Random(0)
    text = [generator.randrange(6) for _ in range(5)]
    session = NgramDrafter(vocab_size=6, longest=4).open(2)
    for _ in range(60):
        text += [generator.randrange(6) for _ in range(generator.randrange(1, 5))]
        for shape in (Chain(), BestFirst(12)):
            budget = Budget(gamma=5, shape=shape)
            (draft,) = session.propose([ask(1, text, budget)])
            fresh = propose(text, budget, longest=4)
            assert paths(draft) == paths(fresh)
            assert len(draft.tree) <= 12


def test_rows_do_not_mix_and_rewind_starts_anew() -> None:
    session = NgramDrafter(vocab_size=10).open(2)
    first, second = session.propose([ask(0, [1, 2, 3, 1], CHAIN), ask(1, [1, 5, 6, 1], CHAIN)])
    assert first.tree.tokens.tolist() == [2, 3, 1, 2]
    assert second.tree.tokens.tolist() == [5, 6, 1, 5]
    session.rewind(0, 2)
    assert session.propose([ask(0, [1, 2, 4, 4, 2], CHAIN)])[0].tree.tokens.tolist() == [4, 4, 2, 4]
    assert session.passes == 0


@pytest.mark.parametrize("shape", [Samples(2), Siblings((2, 1))])
def test_sampled_trees_are_refused(shape: Samples | Siblings) -> None:
    with pytest.raises(InputError, match="n-gram"):
        NgramDrafter(vocab_size=10).provenance(Budget(gamma=2, shape=shape))


@pytest.mark.parametrize("options", [{"longest": 0}, {"longest": 2, "shortest": 3}, {"occurrences": 0}])
def test_settings_that_mean_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        NgramDrafter(vocab_size=10, **options)
