"""What holds for every rule, draft, law and seed, in float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff.randomness import RandomStream
from specdiff.trees.best_first import best_first
from specdiff.trees.paths import leaf_paths
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import Draft, DraftLaw, Extra, Provenance, TokenTree
from specdiff.verify.registry import RULES
from specdiff.verify.self_selection import best_path

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)
VOCAB = st.integers(2, 40)
SEEDS = st.integers(0, 2**32)


class RandomLaw:
    """Rows of random sharpness with many zeros, made from the row's index alone."""

    def __init__(self, vocab: int, seed: int, dtype: torch.dtype, *, greedy: bool) -> None:
        self.vocab, self.seed, self.dtype, self.greedy = vocab, seed, dtype, greedy

    def row(self, index: int) -> Tensor:
        """The same row every time it is asked for."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + index)
        logits = torch.randn(self.vocab, generator=generator, dtype=torch.float64)
        logits *= 10 ** float(torch.rand((), generator=generator) * 2 - 0.5)
        logits[torch.rand(self.vocab, generator=generator) < 0.4] = -torch.inf
        logits[int(torch.randint(self.vocab, (), generator=generator))] = 1.0
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(), self.vocab).to(self.dtype)
        return torch.softmax(logits, dim=-1).to(self.dtype)

    def choice(self, index: int) -> int:
        """The argmax."""
        return int(self.row(index).argmax())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Draft, RandomLaw, int]:
    """A draft of any kind, a law, a seed."""
    vocab, seed = draw(VOCAB), draw(SEEDS)
    width = draw(st.integers(1, vocab))
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:width].sort().values
    columns = None if width == vocab else ids
    depth = draw(st.integers(0, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    q = RandomLaw(width, seed + 1, draw(st.sampled_from([torch.float32, torch.float64])), greedy=draw(st.booleans()))
    rows = torch.stack([q.row(i) for i in range(depth)]) if depth else torch.empty(0, width)
    random = RandomStream(seed, "draft")
    kind = draw(st.sampled_from(["chain", "draws", "siblings", "best-first", "none"]))
    if kind == "chain":
        draft = sample_chain(rows, random, columns)
    elif kind == "draws":
        draft = sample_paths(rows, draw(st.integers(1, 5)), random, columns)
    elif kind == "siblings":
        widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        draft = siblings_without_replacement(rows, widths, random, columns)
    elif kind == "best-first":
        draft = best_first(rows.log(), draw(st.integers(1, 12)), columns)
    else:
        draft = Draft(TokenTree(torch.empty(0, dtype=torch.int64), ()))
    return draft, RandomLaw(vocab, seed + 2, dtype, greedy=draw(st.booleans())), seed


@SETTINGS
@given(cases())
def test_a_verdict_is_a_path_and_a_possible_token(case: tuple[Draft, RandomLaw, int]) -> None:
    """Root-down path, possible tokens only, and the right name for the extra token."""
    draft, law, seed = case
    for rule in RULES.values():
        if draft.provenance not in rule.exact_for or (rule.greedy_only and not law.greedy):
            continue
        if rule.needs_chain and not draft.tree.is_chain:
            continue
        verdict = rule.verify(draft, law, RandomStream(seed, "verify"))
        parent = -1
        for node in verdict.path:
            assert draft.tree.parents[node] == parent, rule.name
            assert float(law.row(parent + 1)[int(draft.tree.tokens[node])]) > 0, rule.name
            parent = node
        assert 0 <= verdict.token < law.vocab
        assert float(law.row(parent + 1)[verdict.token]) > 0, rule.name
        if parent not in draft.tree.parents:
            assert verdict.extra is Extra.BONUS, rule.name
        elif rule.name != "self_selection":  # it may end its best path where another one goes on
            assert verdict.extra is Extra.RECOVERED, rule.name


@SETTINGS
@given(cases())
def test_a_verdict_depends_on_the_random_stream_only(case: tuple[Draft, RandomLaw, int]) -> None:
    """The same stream gives the same verdict."""
    draft, law, seed = case
    for rule in RULES.values():
        if draft.provenance in rule.exact_for and not rule.greedy_only and not rule.needs_chain:
            first, again = (rule.verify(draft, law, RandomStream(seed, "verify")) for _ in range(2))
            assert first == again


@SETTINGS
@given(cases())
def test_at_temperature_zero_all_rules_commit_the_argmaxes(case: tuple[Draft, RandomLaw, int]) -> None:
    """One-hot rows: whatever the rule, accepted tokens and the extra one are the target's own choices."""
    draft, law, seed = case
    law.greedy = True
    for rule in RULES.values():
        if draft.provenance in rule.exact_for and (draft.tree.is_chain or not rule.needs_chain):
            verdict = rule.verify(draft, law, RandomStream(seed, "verify"))
            row = 0
            for node in verdict.path:
                assert int(draft.tree.tokens[node]) == law.choice(row), rule.name
                row = node + 1
            assert verdict.token == law.choice(row), rule.name


@SETTINGS
@given(cases())
def test_self_selection_finds_the_best_path_whatever_rows_it_leaves_out(case: tuple[Draft, RandomLaw, int]) -> None:
    """The search with bounds against scores of all paths; the first one on ties."""
    draft, law, _ = case
    paths = draft.paths or leaf_paths(draft.tree.parents)

    def score(path: Sequence[int]) -> float:
        total, reach, row = 0.0, 1.0, 0
        for node in path:
            reach *= float(law.row(row)[int(draft.tree.tokens[node])])
            total, row = total + reach, node + 1
        return total

    if paths:
        assert best_path(paths, draft.tree, law) == max(paths, key=score)


def test_self_selection_asks_for_no_row_below_a_path_that_cannot_win() -> None:
    """One likely path, one that is lost at its first token."""
    rows = torch.tensor([[0.9, 0.1], [1.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    asked: list[int] = []

    class Law(_ByDepth):
        def row(self, index: int) -> Tensor:
            asked.append(index)
            return super().row(index)

    tree = TokenTree(torch.tensor([0, 0, 0, 1, 0, 0]), (-1, 0, 1, -1, 3, 4))
    assert best_path([[3, 4, 5], [0, 1, 2]], tree, Law(rows, tuple(range(7)))) == [0, 1, 2]
    assert set(asked) == {0, 1, 2}


@SETTINGS
@given(st.integers(1, 30), SEEDS, st.integers(1, 4))
def test_equal_laws_accept_everything(vocab: int, seed: int, depth: int) -> None:
    """Q = p, bit for bit: the residual is empty and never needed."""
    p = RandomLaw(vocab, seed, torch.float32, greedy=False)
    rows = torch.stack([p.row(i) for i in range(depth)])
    for draft in (sample_chain(rows, RandomStream(seed, "draft")), sample_paths(rows, 3, RandomStream(seed, "draft"))):
        law = _ByDepth(rows, (0, *draft.tree.depths))
        for name in ("ratio", "block", "multi_round", "without_replacement", "traversal"):
            if draft.provenance in RULES[name].exact_for:
                verdict = RULES[name].verify(draft, law, RandomStream(seed, "verify"))
                assert verdict.path == draft.paths[0], name


class _ByDepth:
    """P is row d of the drafter at depth d; one more row after the last."""

    greedy = False

    def __init__(self, rows: Tensor, depths: tuple[int, ...]) -> None:
        self._rows, self._depths = torch.cat([rows, rows[-1:]]), depths

    def row(self, index: int) -> Tensor:
        """By depth."""
        return self._rows[self._depths[index]]

    def choice(self, index: int) -> int:
        """The argmax."""
        return int(self.row(index).argmax())


@settings(SETTINGS, max_examples=25)
@given(SEEDS)
def test_a_drawn_token_whose_q_underflows_is_harmless(seed: int) -> None:
    """Q says 0 for a token that was drawn in higher precision: no division by zero, no impossible token."""
    q = torch.tensor([[1.0, 0.0, 0.0]])
    tree = TokenTree(torch.tensor([1]), (-1,))
    p = RandomLaw(3, seed, torch.float32, greedy=False)
    for provenance in (Provenance.CHAIN, Provenance.IID, Provenance.WITHOUT_REPLACEMENT):
        paths = () if provenance is Provenance.WITHOUT_REPLACEMENT else ((0,),)
        draft = Draft(tree, provenance, DraftLaw(q, (0, -1)), paths)
        for rule in RULES.values():
            if provenance in rule.exact_for and not rule.greedy_only:
                verdict = rule.verify(draft, p, RandomStream(seed, "verify"))
                assert float(p.row(len(verdict.path))[verdict.token]) > 0
