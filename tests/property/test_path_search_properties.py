"""The path search against a search through all paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.ngram.base import NgramScorer
from specdiff.trees.lattice import Lattice, prune
from specdiff.trees.path_search import causal_paths, search
from specdiff.types import CausalPaths, Provenance
from support.scoring import HashScorer

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
WHOLE = 400
"""A beam that holds every path of the lattices below."""


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    """1 to 4 positions of 1 to 4 candidates among 6 tokens; up to two of the tokens end a path."""
    depth = draw(st.integers(1, 4))
    tokens = draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple),
            min_size=depth,
            max_size=depth,
        )
    )
    values = [tuple(draw(st.floats(-8.0, 0.0)) for _ in row) for row in tokens]
    return Lattice(tuple(tokens), tuple(values), frozenset(draw(st.sets(st.integers(0, 5), max_size=2))))


SCORERS = st.builds(HashScorer, st.integers(1, 4), seed=st.integers(0, 99))
CONTEXTS = st.lists(st.integers(0, 5), max_size=4)


@dataclass
class Found:
    """A path by the slow way."""

    tokens: tuple[int, ...]
    score: float
    fair: float = math.nan


def all_paths(lattice: Lattice, context: Sequence[int], scorer: NgramScorer, weight: float) -> list[Found]:
    """Every path that ends in EOS or with the lattice, its whole score summed anew from the whole text."""
    lines: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for row in lattice.tokens:
        level = [(*line, token) for line in level if not set(line) & lattice.ends for token in row]
        lines += level

    def score(line: tuple[int, ...]) -> float:
        total = 0.0
        for i, token in enumerate(line):
            log_q = lattice.log_q[i][lattice.tokens[i].index(token)]
            (log_p,) = scorer.log_probs([*context, *line[:i]], [token])
            total += weight * log_q + (1 - weight) * log_p
        return total

    scores = {line: score(line) for line in lines}
    best = {}
    for size in {len(line) for line in lines}:
        same = [line for line in lines if len(line) == size]
        best[size] = max(scores[line] for line in [x for x in same if x[-1] not in lattice.ends] or same)
    return [
        Found(line, scores[line], scores[line] - best[len(line)])
        for line in lines
        if line[-1] in lattice.ends or len(line) == len(lattice)
    ]


@SETTINGS
@given(lattices(), CONTEXTS, SCORERS, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(1, 12))
def test_a_beam_over_the_whole_lattice_is_a_full_search(
    lattice: Lattice, context: list[int], scorer: HashScorer, weight: float, keep: int
) -> None:
    found = search(lattice, context, scorer, CausalPaths(beam=WHOLE, keep=keep, weight=weight))
    wanted = sorted(all_paths(lattice, context, scorer, weight), key=lambda path: -path.fair)
    assert [path.fair for path in found] == pytest.approx([path.fair for path in wanted[:keep]], abs=1e-9)
    by_tokens = {path.tokens: path for path in wanted}
    assert len({path.tokens for path in found}) == len(found)
    for path in found:
        assert path.fair == pytest.approx(by_tokens[path.tokens].fair, abs=1e-9)
        assert path.score == pytest.approx(by_tokens[path.tokens].score, abs=1e-9)


@SETTINGS
@given(lattices(), CONTEXTS, SCORERS, st.integers(1, 4), st.data())
def test_any_beam_gives_paths_of_the_lattice(
    lattice: Lattice, context: list[int], scorer: HashScorer, beam: int, data: st.DataObject
) -> None:
    """Distinct, ranked, ended by EOS or the lattice's end and nowhere else, and the same every time."""
    shape = CausalPaths(beam=beam, keep=data.draw(st.integers(1, beam)))
    found = search(lattice, context, scorer, shape)
    assert found == search(lattice, context, scorer, shape)
    assert 1 <= len(found) <= shape.keep
    assert len({path.tokens for path in found}) == len(found)
    assert [path.fair for path in found] == sorted((path.fair for path in found), reverse=True)
    for path in found:
        assert all(token in row for token, row in zip(path.tokens, lattice.tokens, strict=False))
        assert not set(path.tokens[:-1]) & lattice.ends
        assert len(path.tokens) == len(lattice) or path.tokens[-1] in lattice.ends


@SETTINGS
@given(lattices(), CONTEXTS, SCORERS, st.integers(1, 4))
def test_an_eos_that_loses_at_its_place_never_wins(
    lattice: Lattice, context: list[int], scorer: HashScorer, beam: int
) -> None:
    """Where the best path ends in EOS, no candidate after the same prefix that goes on has a larger gain."""
    best = search(lattice, context, scorer, CausalPaths(beam=beam))[0]
    last = len(best.tokens) - 1
    if best.tokens[-1] not in lattice.ends:
        return
    row = lattice.tokens[last]
    causal = scorer.log_probs([*context, *best.tokens[:-1]], row)
    gains = {t: 0.5 * q + 0.5 * p for t, q, p in zip(row, lattice.log_q[last], causal, strict=True)}
    assert all(gains[t] <= gains[best.tokens[-1]] + 1e-9 for t in row if t not in lattice.ends)


@st.composite
def marginals(draw: st.DrawFn) -> Tensor:
    """[0..4, 1..7] log-probabilities, ties and zeros included."""
    depth, width = draw(st.integers(0, 4)), draw(st.integers(1, 7))
    values = st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.5, 1.0, 3.0])
    rows = draw(st.lists(st.lists(values, min_size=width, max_size=width).filter(any), min_size=depth, max_size=depth))
    weights = torch.tensor(rows, dtype=torch.float64).reshape(depth, width)
    return (weights / weights.sum(dim=-1, keepdim=True)).log()


@SETTINGS
@given(marginals(), st.sampled_from([0.1, 0.5, 0.8, 1.0]), st.integers(1, 8), st.data())
def test_the_lattice_keeps_what_it_should(log_probs: Tensor, mass: float, cap: int, data: st.DataObject) -> None:
    """By rank: no more than needed for the mass, at most the cap; beside them EOS; up to the raw draft's first EOS."""
    depth, width = log_probs.shape
    eos = data.draw(st.lists(st.integers(0, width - 1), max_size=2, unique=True))
    lattice = prune(log_probs, CausalPaths(mass=mass, cap=cap), eos=eos)
    ends = [j for j in range(depth) if int(log_probs[j].argmax()) in eos]
    assert lattice.generated == (ends[0] if ends else depth)
    assert len(lattice) == min(depth, lattice.generated + 1)
    for row, tokens, values in zip(log_probs.exp().tolist(), lattice.tokens, lattice.log_q, strict=False):
        ranked = sorted((p for p in row if p > 0), reverse=True)
        needed = next((n for n in range(1, len(ranked)) if sum(ranked[:n]) >= mass - 1e-9), len(ranked))
        size = min(needed, cap)
        rest = [t for t in eos if row[t] > 0 and t not in tokens]
        assert not rest
        usual = [t for t in tokens if t not in eos or row[t] > ranked[size - 1]]
        assert size - len(eos) <= len(usual) <= size
        assert all(row[t] >= ranked[size - 1] for t in usual)
        assert [row[t] for t in tokens] == sorted((row[t] for t in tokens), reverse=True)
        assert values == pytest.approx([math.log(row[t]) for t in tokens])


@SETTINGS
@given(marginals(), SCORERS, st.integers(1, 4), st.data())
def test_the_draft_is_the_trie_of_the_paths(
    log_probs: Tensor, scorer: HashScorer, beam: int, data: st.DataObject
) -> None:
    width = log_probs.shape[1]
    shape = CausalPaths(beam=beam, keep=data.draw(st.integers(1, beam)))
    vocab = torch.arange(width) * 3 + 1
    eos = data.draw(st.lists(st.integers(0, width - 1), max_size=2, unique=True))
    draft = causal_paths(log_probs, shape, [1, 2], scorer, vocab, eos=eos, source="d")
    paths = search(prune(log_probs, shape, vocab, eos=eos), [1, 2], scorer, shape)
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tree.tokens.tolist(), draft.tree.parents, strict=True):
        texts.append((*texts[parent + 1], token))
    assert set(texts[1:]) == {path.tokens[:n] for path in paths for n in range(1, len(path.tokens) + 1)}
    assert len(set(texts)) == len(texts)
    for text, score in zip(texts[1:], draft.scores, strict=True):
        product = sum(float(log_probs[j, (token - 1) // 3]) for j, token in enumerate(text))
        assert score == pytest.approx(product)
    assert draft.provenance is Provenance.FIXED
