"""Shapes, multiplicity and order of drafts built from marginals."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.randomness import RandomStream, Uniforms
from specdiff.trees.best_first import best_first
from specdiff.trees.sampled import merge, sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import Draft, Provenance


def stream(seed: int = 0) -> RandomStream:
    return RandomStream(seed, "draft")


def rows(depth: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(depth, vocab, generator=generator), dim=-1)


def test_a_chain_takes_one_token_a_row() -> None:
    draft = sample_chain(torch.eye(3)[[2, 0, 1]], stream(), source="d")
    assert draft.tree.tokens.tolist() == [2, 0, 1]
    assert draft.tree.is_chain
    assert draft.provenance is Provenance.CHAIN
    assert draft.paths == ((0, 1, 2),)
    assert draft.law is not None
    assert draft.law.row_of == (0, 1, 2, -1)
    assert draft.source == "d"


def test_equal_draws_share_nodes_and_keep_their_multiplicity() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    # row by row: the first tokens of all draws, then the second tokens
    draft = sample_paths(probs, 3, Uniforms([0.1, 0.9, 0.1, 0.9, 0.1, 0.9]))
    assert draft.tree.tokens.tolist() == [0, 1, 1, 0]
    assert draft.tree.parents == (-1, 0, -1, 2)
    assert draft.paths == ((0, 1), (2, 3), (0, 1))
    assert draft.law is not None
    assert draft.law.row_of == (0, 1, -1, 1, -1)


def test_merge_handles_chains_of_any_length() -> None:
    assert merge([[5, 6], [5], [], [5, 7]]) == ([5, 6, 7], [-1, 0, 0], [(0, 1), (0,), (), (0, 2)])


def test_siblings_are_distinct_and_in_node_order() -> None:
    draft = siblings_without_replacement(rows(3, 10), (4, 2, 1), stream())
    assert draft.provenance is Provenance.WITHOUT_REPLACEMENT
    assert draft.tree.depths == (1,) * 4 + (2,) * 8 + (3,) * 8
    assert draft.tree.parents[4:12] == (0, 0, 1, 1, 2, 2, 3, 3)
    tokens = draft.tree.tokens.tolist()
    assert len(set(tokens[:4])) == 4
    assert all(tokens[i] != tokens[i + 1] for i in range(4, 12, 2))
    assert draft.law is not None
    assert draft.law.row_of == (0,) + (1,) * 4 + (2,) * 8 + (-1,) * 8
    assert draft.paths == ()


def test_rows_with_few_tokens_have_fewer_siblings() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7], [0.0, 1.0, 0.0]])
    draft = siblings_without_replacement(probs, (3, 2), stream())
    assert draft.tree.parents == (-1, -1, 0, 1)
    assert sorted(draft.tree.tokens[:2].tolist()) == [1, 2]
    assert draft.tree.tokens[2:].tolist() == [1, 1]


def test_a_window_shorter_than_the_widths_cuts_the_tree() -> None:
    assert siblings_without_replacement(rows(1, 5), (2, 2, 2), stream()).tree.depth == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda probs, vocab: sample_chain(probs, stream(), vocab),
        lambda probs, vocab: sample_paths(probs, 4, stream(), vocab),
        lambda probs, vocab: siblings_without_replacement(probs, (3, 2), stream(), vocab),
        lambda probs, vocab: best_first(probs.log(), 6, vocab),
    ],
)
def test_columns_become_target_ids(build: Callable[..., Draft]) -> None:
    vocab = torch.tensor([3, 50, 70, 71])
    plain, mapped = build(rows(2, 4), None), build(rows(2, 4), vocab)
    assert mapped.tree.tokens.tolist() == vocab[plain.tree.tokens].tolist()
    assert mapped.tree.parents == plain.tree.parents


@pytest.mark.parametrize(
    "build",
    [
        lambda probs: sample_chain(probs, stream()),
        lambda probs: sample_paths(probs, 4, stream()),
        lambda probs: siblings_without_replacement(probs, (3, 2), stream()),
        lambda probs: best_first(probs, 6),
    ],
)
def test_an_empty_window_gives_the_empty_tree(build: Callable[..., Draft]) -> None:
    assert len(build(torch.empty(0, 4)).tree) == 0


def test_best_first_takes_the_largest_products() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]])
    draft = best_first(probs.log(), 5)
    # .6, .6 x .5, .3, .6 x .4, .3 x .5
    assert draft.tree.tokens.tolist() == [0, 0, 1, 1, 0]
    assert draft.tree.parents == (-1, 0, -1, 0, 2)
    assert draft.provenance is Provenance.FIXED
    assert draft.law is None


def test_best_first_leaves_out_what_cannot_happen() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert len(best_first(probs.log(), 10).tree) == 3


def test_best_first_is_fast() -> None:
    """A tree of 64 nodes over 8 rows of 9,000 tokens: under a millisecond on an idle core, the top-k included."""
    log_probs = rows(8, 9000).log()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        best_first(log_probs, 64)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 3e-3  # with room for a busy machine


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sample_paths(rows(1, 3), 0, stream()), "k"),
        (lambda: siblings_without_replacement(rows(1, 3), (), stream()), "widths"),
        (lambda: siblings_without_replacement(rows(1, 3), (2, 0), stream()), "widths"),
        (lambda: best_first(rows(1, 3), 0), "nodes"),
    ],
)
def test_wrong_sizes_are_refused(call: Callable[[], Draft], name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: expected"):
        call()
