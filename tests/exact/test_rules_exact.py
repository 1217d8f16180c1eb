"""The committed law equals p's, to 1e-12, for every rule and every provenance it declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specdiff.randomness import Random
from specdiff.trees.best_first import best_first
from specdiff.trees.path_search import causal_paths
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import CausalPaths, Draft, Provenance
from specdiff.verify.base import Rule
from specdiff.verify.registry import RULES
from support.scoring import HashScorer

from .enumeration import Drafts, Table, distance, drafts_of, run
from .families import (
    PAIRS,
    autoregressive,
    autoregressive_siblings,
    equal_tables,
    fixed_tree,
    marginals,
    one_hot_p,
    tables,
)

TOLERANCE = 1e-12
QTable = dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Setup:
    """A way of drafting and the size it is enumerated at."""

    name: str
    vocab: int
    gamma: int
    sampler: Callable[[QTable, int], Callable[[Random], Draft]]

    def drafts(self, q: QTable) -> Drafts:
        """All drafts with their probabilities."""
        return drafts_of(self.sampler(q, self.gamma))


def chain(q: QTable, gamma: int) -> Callable[[Random], Draft]:
    """One chain from marginals."""
    return lambda random: sample_chain(marginals(q, gamma), random)


def paths(k: int) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """K chains from marginals."""
    return lambda q, gamma: lambda random: sample_paths(marginals(q, gamma), k, random)


def siblings(*widths: int) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """Siblings without replacement from marginals."""
    return lambda q, gamma: lambda random: siblings_without_replacement(marginals(q, gamma), widths, random)


def autoregressive_paths(
    k: int, provenance: Provenance, stop: int | None = None
) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """K chains from rows that depend on the prefix."""
    return lambda q, gamma: autoregressive(q, gamma, k, provenance, stop=stop)


def fixed(draft: Draft) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """A tree that was not sampled."""
    return lambda q, gamma: lambda random: draft


def best(nodes: int) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """The best-first tree of the marginals."""
    return lambda q, gamma: lambda random: best_first(marginals(q, gamma).log(), nodes)


def searched(keep: int) -> Callable[[QTable, int], Callable[[Random], Draft]]:
    """The paths that the marginals and an n-gram model agree on; the last token ends a path."""

    def sampler(q: QTable, gamma: int) -> Callable[[Random], Draft]:
        log_probs = marginals(q, gamma).log()
        shape = CausalPaths(keep=keep, mass=1.0)
        return lambda random: causal_paths(log_probs, shape, [0], HashScorer(), eos=(log_probs.shape[1] - 1,))

    return sampler


SETUPS = [
    Setup("chain", 2, 3, chain),
    Setup("chain", 3, 2, chain),
    Setup("chain", 5, 2, chain),
    Setup("chain", 8, 1, chain),
    Setup("chain, rows by prefix", 3, 3, autoregressive_paths(1, Provenance.CHAIN)),
    Setup("chain, ragged", 3, 3, autoregressive_paths(1, Provenance.CHAIN, stop=0)),
    Setup("2 draws", 2, 3, paths(2)),
    Setup("2 draws", 3, 2, paths(2)),
    Setup("2 draws", 6, 1, paths(2)),
    Setup("2 draws, rows by prefix", 3, 2, autoregressive_paths(2, Provenance.IID)),
    Setup("2 draws, ragged", 3, 2, autoregressive_paths(2, Provenance.IID, stop=0)),
    Setup("3 draws", 2, 2, paths(3)),
    Setup("3 draws", 3, 1, paths(3)),
    Setup("3 draws, rows by prefix", 2, 2, autoregressive_paths(3, Provenance.IID)),
    Setup("siblings 3, more than tokens", 2, 1, siblings(3)),
    Setup("siblings 3", 4, 1, siblings(3)),
    Setup("siblings 2", 8, 1, siblings(2)),
    Setup("siblings 2-1", 3, 2, siblings(2, 1)),
    Setup("siblings 1-2", 3, 2, siblings(1, 2)),
    Setup("siblings 2-1-1", 2, 3, siblings(2, 1, 1)),
    Setup("siblings 2-2, rows by prefix", 3, 2, lambda q, gamma: autoregressive_siblings(q, (2, 2))),
    Setup("no tree", 4, 1, fixed(fixed_tree())),
    Setup("fixed chain", 3, 3, fixed(fixed_tree([0, 2, 1]))),
    Setup("fixed tree", 4, 3, fixed(fixed_tree([0, 2, 1], [0, 3], [1], [1, 1, 0]))),
    Setup("fixed tree", 8, 2, fixed(fixed_tree([7, 2], [0, 3], [0, 4], [5]))),
    Setup("best-first 5", 4, 2, best(5)),
    Setup("one causal path", 3, 3, searched(1)),
    Setup("3 causal paths", 4, 3, searched(3)),
]
LARGE = [
    Setup("siblings 3-2", 3, 2, siblings(3, 2)),
    Setup("3 draws", 5, 1, paths(3)),
]


def rules_for(drafts: Drafts, *, greedy: bool = False) -> list[Rule]:
    """Rules that declare themselves exact for these drafts."""
    provenance = drafts[0][1].provenance
    branches = any(not draft.tree.is_chain for _, draft in drafts)
    return [
        rule
        for rule in RULES.values()
        if provenance in rule.exact_for and (greedy or not rule.greedy_only) and not (rule.needs_chain and branches)
    ]


def assert_exact(target: Table, drafts: Drafts, rules: list[Rule]) -> dict[str, Any]:
    """Every rule commits p's law; the figure of row 1."""
    worst, runs = 0.0, 0
    assert sum(weight for weight, _ in drafts) == pytest.approx(1, abs=TOLERANCE)
    for rule in rules:
        result = run(rule, drafts, target)
        assert sum(result.committed.values()) == pytest.approx(1, abs=TOLERANCE), rule.name
        error = distance(result, target)[0]
        assert error <= TOLERANCE, rule.name
        worst, runs = max(worst, error), runs + result.runs
    return {"rules": [rule.name for rule in rules], "laws": len(rules), "runs": runs, "max_error": worst}


@pytest.mark.parametrize("family", [*PAIRS, "equal"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.name} V={s.vocab} gamma={s.gamma}")
def test_committed_law_is_the_target_law(setup: Setup, family: str, figure: Callable[..., None]) -> None:
    """The exact proof: all drafts, all decisions, all families."""
    if family == "equal":
        target, q = equal_tables(setup.vocab, setup.gamma)
    elif setup.vocab < 3 and family == "extreme_ratios":
        pytest.skip("needs a third token")
    else:
        target, q = tables(PAIRS[family], setup.vocab, setup.gamma)
    drafts = setup.drafts(q)
    figure(1, f"{setup.name}, {family}", **assert_exact(target, drafts, rules_for(drafts)))


@pytest.mark.parametrize("family", ["flat", "overlapping"])
@pytest.mark.parametrize("setup", LARGE, ids=lambda s: f"{s.name} V={s.vocab} gamma={s.gamma}")
def test_committed_law_is_the_target_law_on_wide_trees(setup: Setup, family: str, figure: Callable[..., None]) -> None:
    """Rules that use q, on the widest trees."""
    target, q = tables(PAIRS[family], setup.vocab, setup.gamma)
    drafts = setup.drafts(q)
    rules = [rule for rule in rules_for(drafts) if Provenance.FIXED not in rule.exact_for]
    figure(1, f"{setup.name}, {family}", **assert_exact(target, drafts, rules))


@pytest.mark.parametrize("setup", [s for s in SETUPS if s.vocab <= 4], ids=lambda s: f"{s.name} V={s.vocab} {s.gamma}")
def test_every_rule_is_exact_at_temperature_zero(setup: Setup, figure: Callable[..., None]) -> None:
    """One-hot p announced as greedy: match included, and all rules commit the argmaxes."""
    target, q = tables(one_hot_p, setup.vocab, setup.gamma, seed=1)
    target.greedy = True
    drafts = setup.drafts(q)
    rules = rules_for(drafts, greedy=True)
    assert RULES["match"] in rules
    figure(1, f"{setup.name}, temperature 0", **assert_exact(target, drafts, rules))


@pytest.mark.parametrize("family", ["flat", "sharp", "one_hot_q"])
def test_a_draft_vocabulary_may_be_a_subset(family: str, figure: Callable[..., None]) -> None:
    """Columns of q map to target ids; tokens outside have q = 0."""
    target, _ = tables(PAIRS[family], 4, 2)
    _, q = tables(PAIRS[family], 2, 2)
    rows, vocab = marginals(q, 2), torch.tensor([1, 3])
    for sampler in (
        lambda random: sample_chain(rows, random, vocab),
        lambda random: sample_paths(rows, 2, random, vocab),
        lambda random: siblings_without_replacement(rows, (2, 1), random, vocab),
        lambda random: best_first(rows.log(), 4, vocab),
        lambda random: causal_paths(rows.log(), CausalPaths(keep=2, mass=1.0), [0], HashScorer(), vocab, eos=(1,)),
    ):
        drafts = drafts_of(sampler)
        assert set(drafts[0][1].tree.tokens.tolist()) <= {1, 3}
        figure(1, f"half of the vocabulary, {family}", **assert_exact(target, drafts, rules_for(drafts)))


@pytest.mark.parametrize("family", ["flat", "extreme_ratios"])
def test_float32_rows_cost_rounding_only(family: str) -> None:
    """The rows a model gives sum to 1 up to 1e-7 only; nothing in the rules amplifies that."""
    double, q = tables(PAIRS[family], 3, 2)
    target = Table({prefix: row.float() for prefix, row in double.rows.items()}, double.length)
    rows = marginals(q, 2).float()
    for sampler in (
        lambda random: sample_chain(rows, random),
        lambda random: sample_paths(rows, 2, random),
        lambda random: siblings_without_replacement(rows, (2, 1), random),
    ):
        drafts = drafts_of(sampler)
        for rule in rules_for(drafts):
            assert distance(run(rule, drafts, target), target)[0] < 1e-6, rule.name
