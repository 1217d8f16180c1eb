"""What a verification rule is.

A rule is a pure function of a draft, the target's law at every node and a source of random decisions. It knows no
model, no drafter and no global generator, and it declares for which drafts it is exact; `check` refuses the others.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdiff.errors import PairingError
from specdiff.randomness import Random
from specdiff.types import Draft, DraftLaw, Provenance, TokenTree, Verdict


class TargetLaw(Protocol):
    """The law p of plain sampling at the root and at every node: row 0 is the root's, row n + 1 node n's.

    Attributes:
        greedy: whether every row is one-hot (temperature 0).
    """

    greedy: bool

    def row(self, index: int) -> Tensor:
        """Probabilities [V] of one row (float32 or float64, summing to 1); at temperature 0 one-hot."""
        ...

    def choice(self, index: int) -> int:
        """The most probable token of one row; the only one at temperature 0."""
        ...


class Rule(Protocol):
    """A verification rule.

    Attributes:
        name: the name used in code, CLI and reports.
        exact_for: provenances for which the committed law equals p at every temperature.
        greedy_only: whether the rule is exact at temperature 0 only (then for drafts of any provenance).
    """

    name: str
    exact_for: frozenset[Provenance]
    greedy_only: bool

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Return the accepted path and the one extra token."""
        ...


def check(rule: Rule, provenance: Provenance, *, greedy: bool) -> None:
    """Refuse a rule that is not exact for drafts of this provenance.

    Raises:
        PairingError: naming the rule, the draft's provenance and the rules that fit.
    """
    if rule.greedy_only and not greedy:
        raise PairingError.of(
            "rule", expected="a rule that is exact at temperature > 0", got=rule.name,
            remedy="use rule='auto' or rule='walk', or temperature 0",
        )
    if provenance not in rule.exact_for:
        fits = ", ".join(sorted(p.value for p in rule.exact_for))
        raise PairingError.of(
            "rule", expected=f"a rule that is exact for a {provenance.value!r} draft", got=rule.name,
            remedy=f"{rule.name} is exact for: {fits}; use rule='auto', or a draft shape that {rule.name} fits",
        )


def children_of(tree: TokenTree) -> list[list[int]]:
    """Children of the root (index 0) and of every node n (index n + 1), in node order."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        children[parent + 1].append(node)
    return children


def dense_q(law: DraftLaw, node: int, like: Tensor) -> Tensor:
    """The q row [V] that the children of ``node`` (-1: the root) were drawn from, as dense as the target row ``like``."""
    row = law.rows[law.row_of[node + 1]].to(device=like.device, dtype=like.dtype)
    if law.vocab is None:
        return row
    dense = like.new_zeros(like.shape)
    dense[law.vocab.to(like.device)] = row
    return dense


def positive_part(weights: Tensor, fallback: Tensor) -> Tensor:
    """Clamp ``weights`` at 0; where nothing is left (p = q up to rounding) the residual is never needed: p itself."""
    clamped = weights.clamp_min(0)
    return clamped if bool(clamped.sum() > 0) else fallback
