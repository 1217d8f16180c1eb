"""traversal: from the leaves to the root, block verification for sampled trees (Weng et al. 2505.12398).

Why it is exact, and for which drafts. Give every visited node v a rate a, a target law p and the law q of its next
untested child. Claim: the subtree of v, its draws averaged over, ends the round at or below v with probability a, and
then the tokens after v follow p. For a node without untested children this is how it is decided: a coin of
probability a, a draw from p. Otherwise the next child x ~ q gets the rate b(x) = min(1, a p(x) / q(x)); by induction
its subtree ends the round with probability b(x), in all q(x) b(x) = min(a p(x), q(x)) for the token x. What is missing
to a p(x) is (a p - q)+, of total S, and the child fails with probability 1 - a + S. So v goes on with the rate
S / (S + 1 - a), the law norm (a p - q)+, and its next child. The root has a = 1 throughout: the round always ends.

The induction asks that the next child is drawn from the known q whatever was examined before. Siblings without
replacement: q loses each failed token. I.i.d. draws merged into a trie: every draw is tested in its turn, the second
copy of a failed token with rate 0; the subtree of x holds the continuations of all draws that equal x, yet it fails
with probability 1 - b(x) however many they are, so its failure says nothing about the later draws. A tree of fixed
origin has no q, and the rule is not exact for it. For one chain it is block verification.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, acceptance, dense_q, draws_of, keep, require, tokens_of, without


@dataclass
class _Visit:
    """A node on the current path: its rate, its laws and its untested draws (last one next)."""

    rate: float
    p: Tensor
    q: Tensor | None
    untested: list[int]


class Traversal:
    """Verify sampled trees bottom-up: a leaf that fails still leaves its ancestors a chance."""

    name = "traversal"
    exact_for = frozenset({Provenance.CHAIN, Provenance.IID, Provenance.WITHOUT_REPLACEMENT})
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use at most one coin a node, and one draw."""
        require(self, draft, law)
        tokens = tokens_of(draft.tree)
        draws = draws_of(draft)
        distinct = draft.provenance is Provenance.WITHOUT_REPLACEMENT

        def visit(row: int, rate: float) -> _Visit:
            p = law.row(row)
            q = dense_q(draft.law, row - 1, like=p) if draws[row] else None
            return _Visit(rate, p, q, draws[row][::-1])

        path: list[int] = []
        visits = [visit(0, 1.0)]
        while True:
            here = visits[-1]
            if here.untested and here.rate > 0:
                node = here.untested.pop()
                assert here.q is not None
                rate = min(1.0, here.rate * acceptance(here.p, here.q, tokens[node]))
                if rate > 0:
                    path.append(node)
                    visits.append(visit(node + 1, rate))
                    continue
                failed = node  # nothing below it can be kept
            elif random.coin(here.rate):
                extra = Extra.RECOVERED if here.q is not None else Extra.BONUS
                return Verdict(tuple(path), random.draw(here.p), extra)
            else:
                visits.pop()
                failed = path.pop()
            _fail(visits[-1], tokens[failed], distinct=distinct)


def _fail(parent: _Visit, token: int, *, distinct: bool) -> None:
    """Go on at ``parent`` after the subtree of its child ``token`` failed."""
    assert parent.q is not None
    left = (parent.rate * parent.p - parent.q).clamp_min(0)
    total = left.sum().item()
    parent.rate = keep(parent.rate, total)
    if total > 0:  # else the rate is 0, or the failure had probability 0 up to rounding
        parent.p = left / total
    if distinct:
        parent.q = without(parent.q, token)
