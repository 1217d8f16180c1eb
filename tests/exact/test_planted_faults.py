"""The exact tests have teeth: every planted fault moves the committed law by a total variation above 1e-3.

Faults are planted in the production pieces (a replaced helper, a random source that cheats, a law with a wrong row, a
draft that misstates its q), never in a copy of a rule. Two controls that look wrong but are exact must pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specdiff.randomness import Cdf, Random, Uniforms, inverse_cdf
from specdiff.trees.best_first import best_first
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import Draft, DraftLaw, Provenance, TokenTree
from specdiff.verify.base import TargetLaw, positive_part
from specdiff.verify.registry import RULES

from .enumeration import Drafts, Table, distance, drafts_of, run
from .families import fixed_tree, flat, marginals, sharp, tables

SEEN = 1e-3
TARGET, Q = tables(sharp, 3, 2, seed=6)
ROWS = marginals(Q, 2)
CHAIN = drafts_of(lambda random: sample_chain(ROWS, random))
IID = drafts_of(lambda random: sample_paths(ROWS, 2, random))
DISTINCT = drafts_of(lambda random: siblings_without_replacement(ROWS, (2, 1), random))
FIXED: Drafts = [(1.0, fixed_tree([0, 2], [1, 0]))]
SINGLE: Drafts = [(1.0, fixed_tree([0, 2]))]
DRAFTS = {
    "ratio": CHAIN,
    "block": CHAIN,
    "multi_round": IID,
    "without_replacement": DISTINCT,
    "traversal": IID,
    "point_mass": SINGLE,
    "self_selection": FIXED,
    "walk": FIXED,
}
USES_Q = ("ratio", "block", "multi_round", "without_replacement", "traversal")


def variation(rule: str, drafts: Drafts, target: Table = TARGET, **kwargs: Callable[[Random], Random]) -> float:
    """Total variation between the committed law and p's."""
    return distance(run(RULES[rule], drafts, target, **kwargs), target)[1]


@pytest.mark.parametrize("rule", DRAFTS)
def test_without_a_fault_nothing_is_seen(rule: str) -> None:
    """The baseline of every fault below."""
    assert variation(rule, DRAFTS[rule]) < 1e-12


# -- faults of the rules' pieces ---------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, rule: str, piece: str, fault: object) -> None:
    """Replace a helper in the module of one rule."""
    monkeypatch.setattr(importlib.import_module(f"specdiff.verify.{rule}"), piece, fault)


@pytest.mark.parametrize("rule", ["ratio", "multi_round", "without_replacement"])
def test_residual_is_p(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from p itself."""
    plant(monkeypatch, rule, "residual", lambda p, q: p)
    assert variation(rule, DRAFTS[rule]) > SEEN


@pytest.mark.parametrize("rule", ["multi_round", "without_replacement"])
def test_residual_not_renormalised(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sibling is tested against (p - q)+ instead of its law."""
    plant(monkeypatch, rule, "residual", lambda p, q: positive_part(p - q, fallback=p))
    assert variation(rule, DRAFTS[rule]) > SEEN


def test_rejected_token_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point mass draws from p with the rejected token still in it; siblings without replacement keep it in q."""
    plant(monkeypatch, "point_mass", "without", lambda weights, token: weights)
    assert variation("point_mass", SINGLE) > SEEN
    plant(monkeypatch, "without_replacement", "without", lambda weights, token: weights)
    assert variation("without_replacement", DISTINCT) > SEEN
    plant(monkeypatch, "traversal", "without", lambda weights, token: weights)
    assert variation("traversal", DISTINCT) > SEEN


def test_draft_distribution_of_siblings_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q loses the rejected token but does not sum to 1."""

    def zeroed(weights: Tensor, token: int) -> Tensor:
        rest = weights.clone()
        rest[token] = 0
        return rest

    plant(monkeypatch, "without_replacement", "without", zeroed)
    assert variation("without_replacement", DISTINCT) > SEEN


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_shorter_prefix_kept_with_its_own_rate(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a prefix is not the probability of ending there once all longer ones failed."""
    plant(monkeypatch, rule, "keep", lambda rate, left: rate)
    assert variation(rule, DRAFTS[rule]) > SEEN


# -- faults of the random decisions ------------------------------------------------------------------------------------


@dataclass
class Lenient:
    """Accepts 10 % too often."""

    inner: Random

    def coin(self, probability: float) -> bool:
        """The fault."""
        return self.inner.coin(1.1 * probability)

    def draw(self, weights: Tensor | Cdf, without: Sequence[int] = ()) -> int:
        """Unchanged."""
        return self.inner.draw(weights, without)


@pytest.mark.parametrize("rule", [rule for rule in DRAFTS if rule != "walk"])
def test_accept_ten_percent_too_lenient(rule: str) -> None:
    """Every rule that tosses coins."""
    assert variation(rule, DRAFTS[rule], change_random=Lenient) > SEEN


@dataclass
class FirstUnverified(Lenient):
    """The first coin always falls on accept."""

    tossed: bool = False

    def coin(self, probability: float) -> bool:
        """The fault."""
        first, self.tossed = not self.tossed, True
        return True if first else self.inner.coin(probability)


@pytest.mark.parametrize("rule", [rule for rule in DRAFTS if rule != "walk"])
def test_first_token_unverified(rule: str) -> None:
    """For the bottom-up rules it is the first prefix tested that is taken unverified."""
    assert variation(rule, DRAFTS[rule], change_random=FirstUnverified) > SEEN


@dataclass
class CoarseUniforms(Lenient):
    """Uniforms in bfloat16: multiples of 1/256."""

    def coin(self, probability: float) -> bool:
        """The share of the 256 uniforms that lie below the probability."""
        return self.inner.coin(sum(i / 256 < probability for i in range(256)) / 256)

    def draw(self, weights: Tensor | Cdf, without: Sequence[int] = ()) -> int:
        """The counts of the 256 inverse CDFs."""
        assert isinstance(weights, Tensor)
        counts = torch.zeros_like(weights)
        for i in range(256):
            counts[inverse_cdf(weights, i / 256)] += 1
        return self.inner.draw(counts, without)


@pytest.mark.parametrize("rule", ["ratio", "walk"])
def test_bfloat16_uniforms(rule: str) -> None:
    """Too few bits are a bias, not only noise."""
    assert variation(rule, DRAFTS[rule], change_random=CoarseUniforms) > SEEN


def test_one_uniform_for_the_test_and_the_residual() -> None:
    """Integrated over a fine grid of the shared uniform, since the decisions are no longer independent."""
    target, q = tables(sharp, 3, 1, seed=3)
    grid = 4096
    rule, committed = RULES["ratio"], {}
    for weight, draft in drafts_of(lambda random: sample_chain(marginals(q, 1), random)):
        law = target.law(draft.tree)
        for cell in range(grid):
            shared = (cell + 0.5) / grid
            verdict = rule.verify(draft, law, Uniforms([shared, shared]))
            text = (*(int(draft.tree.tokens[node]) for node in verdict.path), verdict.token)
            committed[text] = committed.get(text, 0.0) + weight / grid
    difference = (target.joint(committed) - target.joint()).abs().sum() / 2
    assert float(difference) > 10 / grid


# -- faults of the rows ------------------------------------------------------------------------------------------------


@dataclass
class WrongBonusRow:
    """The rows of leaves are the root's: the bonus token comes from the wrong row."""

    inner: TargetLaw
    tree: TokenTree
    greedy: bool = False

    def row(self, index: int) -> Tensor:
        """The fault."""
        leaf = index > 0 and index - 1 not in self.tree.parents
        return self.inner.row(0 if leaf else index)

    def choice(self, index: int) -> int:
        """Unchanged."""
        return self.inner.choice(index)


@pytest.mark.parametrize("rule", DRAFTS)
def test_bonus_from_the_wrong_row(rule: str) -> None:
    """Every rule."""
    faulty = Table(TARGET.rows, TARGET.length)
    faulty.law = lambda tree: WrongBonusRow(TARGET.law(tree), tree)  # type: ignore[method-assign]
    result = run(RULES[rule], DRAFTS[rule], faulty)
    assert distance(result, TARGET)[1] > SEEN


# -- faults of the draft -----------------------------------------------------------------------------------------------


def relabelled(drafts: Drafts, rows: Tensor) -> Drafts:
    """The same drafts, claiming to come from other rows."""
    return [
        (weight, replace(draft, law=DraftLaw(rows, draft.law.row_of)))
        for weight, draft in drafts
        if draft.law is not None
    ]


@pytest.mark.parametrize("rule", USES_Q)
@pytest.mark.parametrize("fault", ["argmax", "temperature", "filters"])
def test_draft_sampled_from_another_law_than_it_says(rule: str, fault: str) -> None:
    """Argmax draft with a softmax q; draft at T = 0.7 with q at T = 1; q before the filters, draft after."""
    if fault == "argmax":
        used = torch.nn.functional.one_hot(ROWS.argmax(-1), 3).double()
    elif fault == "temperature":
        used = torch.softmax(ROWS.log() / 0.7, dim=-1)
    else:
        used = torch.where(ROWS.amin(-1, keepdim=True) == ROWS, 0.0, ROWS)
        used = used / used.sum(-1, keepdim=True)
    drafts = {
        "ratio": lambda random: sample_chain(used, random),
        "block": lambda random: sample_chain(used, random),
        "multi_round": lambda random: sample_paths(used, 2, random),
        "traversal": lambda random: sample_paths(used, 2, random),
        "without_replacement": lambda random: siblings_without_replacement(used, (2, 1), random),
    }[rule]
    assert variation(rule, drafts_of(drafts)) < 1e-12
    assert variation(rule, relabelled(drafts_of(drafts), ROWS)) > SEEN


def test_duplicates_merged_under_multi_round() -> None:
    """Each distinct sibling tested once: a total variation of 0.11 here, at V = 3, K = 3."""
    target, q = tables(flat, 3, 1, seed=7)
    drafts = drafts_of(lambda random: sample_paths(marginals(q, 1), 3, random))
    merged = [(weight, replace(draft, paths=tuple(dict.fromkeys(draft.paths)))) for weight, draft in drafts]
    assert variation("multi_round", drafts, target) < 1e-12
    assert variation("multi_round", merged, target) > 0.1


@pytest.mark.parametrize("rule", ["multi_round", "without_replacement", "traversal"])
def test_siblings_in_an_order_that_depends_on_p(rule: str) -> None:
    """The most probable draw is tested first."""
    by_p = [
        (
            weight,
            replace(
                draft,
                paths=tuple(
                    sorted(
                        draft.paths,
                        key=lambda path, draft=draft: -float(TARGET.rows[()][int(draft.tree.tokens[path[0]])]),
                    )
                ),
            ),
        )
        for weight, draft in IID
    ]
    assert variation(rule, IID) < 1e-12
    assert variation(rule, by_p) > SEEN


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_fixed_tree_that_claims_to_be_sampled(rule: str) -> None:
    """p/q on a best-first path is biased (fact 3)."""
    tree = best_first(ROWS.log(), 2).tree
    assert tree.is_chain
    claimed = Draft(tree, Provenance.CHAIN, DraftLaw(ROWS, (0, 1, -1)), (tuple(range(len(tree))),))
    assert variation(rule, [(1.0, claimed)]) > SEEN


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_best_of_two_draws_passed_off_as_one(rule: str) -> None:
    """Selecting a draft by p and then using q is biased; self-selection never uses q."""

    def best(draft: Draft) -> Draft:
        tokens = draft.tree.tokens.tolist()
        path = max(draft.paths, key=lambda path: float(TARGET.rows[()][tokens[path[0]]]))
        chain = TokenTree(torch.tensor([tokens[node] for node in path]), tuple(range(-1, len(path) - 1)))
        return Draft(chain, Provenance.CHAIN, DraftLaw(ROWS, (0, 1, -1)), (tuple(range(len(path))),))

    assert variation(rule, [(weight, best(draft)) for weight, draft in IID]) > SEEN


# -- controls that look wrong and are exact ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [IID, DISTINCT, FIXED], ids=["draws", "siblings", "fixed"])
def test_walk_ignores_q_and_is_exact(drafts: Drafts) -> None:
    """It never looks at how the tree came about."""
    assert variation("walk", drafts) < 1e-12


def test_point_mass_on_an_argmax_chain_is_exact() -> None:
    """A chain that no sampling would give, with no q at all."""
    assert variation("point_mass", [(1.0, best_first(ROWS.log(), 2))]) < 1e-12
