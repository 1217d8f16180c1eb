"""How the rules relate to each other, without sampling error: who accepts more, who is the same rule in disguise."""

from __future__ import annotations

import pytest
import torch

from specdiff.errors import PairingError
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import Draft, Provenance
from specdiff.verify.base import check
from specdiff.verify.registry import RULES

from .enumeration import Drafts, Result, Table, drafts_of, run
from .families import PAIRS, Pair, fixed_tree, flat, marginals, prefixes, sharp, tables

SEEDS = range(3)
TREES = [
    fixed_tree([0, 2, 1]),
    fixed_tree([0, 2, 1], [0, 1], [1], [1, 1, 0]),
    fixed_tree([0], [1], [2]),
    fixed_tree([2, 2, 2], [2, 2, 0], [1, 0, 0], [1, 0, 1]),
]


def accepted(rule: str, drafts: Drafts, target: Table) -> float:
    """Expected accepted tokens."""
    return run(RULES[rule], drafts, target).accepted


def same(left: Result, right: Result) -> bool:
    """Whether two rules commit the same texts with the same probabilities, round by round."""
    texts = set(left.committed) | set(right.committed)
    return all(abs(left.committed.get(t, 0.0) - right.committed.get(t, 0.0)) < 1e-12 for t in texts)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_walk_dominates_self_selection_draw_by_draw(pair: Pair) -> None:
    """Fact 2: for EVERY draft, not only on average."""
    target, q = tables(pair, 3, 2)
    rows = marginals(q, 2)
    for k in (2, 3):
        for _, draft in drafts_of(lambda random, k=k: sample_paths(rows[: 4 - k], k, random)):
            alone = [(1.0, draft)]
            assert accepted("walk", alone, target) >= accepted("self_selection", alone, target) - 1e-12


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
@pytest.mark.parametrize("pair", [flat, sharp], ids=lambda pair: pair.__name__)
def test_walk_on_a_fixed_tree_accepts_the_mass_of_its_nodes(pair: Pair, tree: Draft) -> None:
    """Fact 3: sum over nodes of p(path), the most that any lossless rule can accept."""
    target, _ = tables(pair, 3, 3)
    reach = [1.0]
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tree.tokens.tolist(), tree.tree.parents, strict=True):
        reach.append(reach[parent + 1] * float(target.rows[texts[parent + 1]][token]))
        texts.append((*texts[parent + 1], token))
    assert accepted("walk", [(1.0, tree)], target) == pytest.approx(sum(reach[1:]), abs=1e-12)
    assert accepted("self_selection", [(1.0, tree)], target) <= sum(reach[1:]) + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_block_accepts_at_least_as_much_as_ratio(pair: Pair, seed: int) -> None:
    """And traversal on a chain is block; multi-round and without replacement on a chain are ratio."""
    target, q = tables(pair, 3, 3, seed)
    drafts = drafts_of(lambda random: sample_chain(marginals(q, 3), random))
    results = {name: run(rule, drafts, target) for name, rule in RULES.items() if name != "match"}
    assert results["block"].accepted >= results["ratio"].accepted - 1e-12
    assert same(results["traversal"], results["block"])
    assert same(results["multi_round"], results["ratio"])
    assert same(results["without_replacement"], results["ratio"])
    assert same(results["point_mass"], results["walk"])
    assert same(results["self_selection"], results["walk"])


def test_block_reproduces_the_example_of_its_paper() -> None:
    """Sun et al., section 2: p = (1/3, 2/3), q = (2/3, 1/3), gamma = 2: 10/9 accepted by ratio, 11/9 by block."""
    p, q = (torch.tensor(row, dtype=torch.float64) / 3 for row in ([1, 2], [2, 1]))
    target = Table(dict.fromkeys(prefixes(2, 3), p), 3)
    drafts = drafts_of(lambda random: sample_chain(q.expand(2, 2), random))
    assert accepted("ratio", drafts, target) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted("block", drafts, target) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pair", [flat, sharp], ids=lambda pair: pair.__name__)
def test_more_draws_never_hurt(pair: Pair, seed: int) -> None:
    """Rules that use q accept more of K = 2 draws, or of two siblings, than of one chain."""
    target, q = tables(pair, 3, 2, seed)
    rows = marginals(q, 2)
    one = accepted("ratio", drafts_of(lambda random: sample_chain(rows, random)), target)
    two = drafts_of(lambda random: sample_paths(rows, 2, random))
    assert accepted("multi_round", two, target) >= one - 1e-12
    siblings = drafts_of(lambda random: siblings_without_replacement(rows, (2, 1), random))
    assert accepted("without_replacement", siblings, target) >= one - 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_traversal_is_not_below_the_top_down_rule_for_the_same_draws(pair: Pair, seed: int) -> None:
    """Measured, not a theorem: no small case is known where testing from the leaves up accepts less."""
    target, q = tables(pair, 3, 2, seed)
    rows = marginals(q, 2)
    draws = drafts_of(lambda random: sample_paths(rows, 2, random))
    assert accepted("traversal", draws, target) >= accepted("multi_round", draws, target) - 1e-12
    siblings = drafts_of(lambda random: siblings_without_replacement(rows, (2, 1), random))
    assert accepted("traversal", siblings, target) >= accepted("without_replacement", siblings, target) - 1e-12


@pytest.mark.parametrize("name", ["ratio", "block", "multi_round", "without_replacement", "traversal"])
def test_rules_that_use_q_refuse_a_draft_without_q(name: str) -> None:
    """Both where the pairing is made and inside the rule."""
    target, _ = tables(flat, 3, 3)
    with pytest.raises(PairingError, match="fixed"):
        check(RULES[name], Provenance.FIXED, greedy=False)
    with pytest.raises(PairingError, match="fixed"):
        run(RULES[name], [(1.0, TREES[0])], target)


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_single_path_rules_refuse_many_draws(name: str) -> None:
    """A merged trie of K draws is not a chain sampled from q, even where it looks like one."""
    target, q = tables(flat, 3, 1)
    drafts = drafts_of(lambda random: sample_paths(marginals(q, 1), 2, random))
    with pytest.raises(PairingError, match="iid"):
        run(RULES[name], drafts, target)


def test_multi_round_refuses_siblings_without_replacement() -> None:
    """Its q would have to shrink."""
    with pytest.raises(PairingError, match="without_replacement"):
        check(RULES["multi_round"], Provenance.WITHOUT_REPLACEMENT, greedy=False)


def test_point_mass_refuses_a_tree() -> None:
    """At the pairing, from the shape; in the rule, from the draft."""
    target, _ = tables(flat, 3, 3)
    check(RULES["point_mass"], Provenance.FIXED, greedy=False, tree=False)
    with pytest.raises(PairingError, match="branch"):
        check(RULES["point_mass"], Provenance.FIXED, greedy=False, tree=True)
    with pytest.raises(PairingError, match="chain"):
        run(RULES["point_mass"], [(1.0, TREES[1])], target)
