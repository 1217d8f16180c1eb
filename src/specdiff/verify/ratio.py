"""ratio: accept x with probability min(1, p(x)/q(x)), else draw from (p - q)+ (Leviathan et al. 2211.17192)."""

from __future__ import annotations

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, acceptance, dense_q, require, residual, tokens_of


class Ratio:
    """The classic rule for ONE chain sampled from q."""

    name = "ratio"
    exact_for = frozenset({Provenance.CHAIN})
    greedy_only = False
    needs_chain = True

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use one coin a visited token, and one draw."""
        require(self, draft, law)
        tokens = tokens_of(draft.tree)
        path = draft.paths[0] if draft.paths else ()
        row = 0
        for depth, node in enumerate(path):
            token = tokens[node]
            p = law.row(row)
            q = dense_q(draft.law, row - 1, like=p)
            if not random.coin(acceptance(p, q, token)):
                return Verdict(path[:depth], random.draw(residual(p, q)), Extra.RECOVERED)
            row = node + 1
        return Verdict(path, random.draw(law.row(row)), Extra.BONUS)
