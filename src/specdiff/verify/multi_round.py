"""multi-round: test K siblings drawn i.i.d. from q in turn (SpecInfer, Miao et al. 2305.09781, algorithm 2).

After each rejection the target law becomes norm (p - q)+ and the next draw is tested against it. Every draw counts,
duplicates included: the second copy of a rejected token is never accepted, but its test still changes the law, and
leaving it out biases the rule.
"""

from __future__ import annotations

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, acceptance, dense_q, draws_of, require, residual, tokens_of


class MultiRound:
    """Verify K chains sampled independently from q, in draw order."""

    name = "multi_round"
    exact_for = frozenset({Provenance.CHAIN, Provenance.IID})
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use one coin a tested draw, and one draw.

        The draws through an accepted node are the next i.i.d. siblings, whichever of them led to it: how many there are
        says nothing about their next tokens.
        """
        require(self, draft, law)
        tokens = tokens_of(draft.tree)
        draws = draws_of(draft)
        path: list[int] = []
        row = 0
        while draws[row]:
            p = law.row(row)
            q = dense_q(draft.law, row - 1, like=p)
            for node in draws[row]:
                if random.coin(acceptance(p, q, tokens[node])):
                    path.append(node)
                    row = node + 1
                    break
                p = residual(p, q)
            else:
                return Verdict(tuple(path), random.draw(p), Extra.RECOVERED)
        return Verdict(tuple(path), random.draw(law.row(row)), Extra.BONUS)
