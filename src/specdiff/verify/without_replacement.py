"""without replacement: rejection sampling over distinct siblings (Sequoia, Chen et al. 2402.12374).

As multi-round, but q too loses each rejected token, since the next sibling was drawn from what was left of q.

It is exact for merged i.i.d. draws as well. The distinct tokens of i.i.d. draws, in order of first appearance, follow
the law of draws without replacement: given the first token x and which draws equal it, the others are i.i.d. from q
without x, and how many there are says nothing about what they are.
"""

from __future__ import annotations

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import (
    TargetLaw,
    acceptance,
    dense_q,
    draws_of,
    require,
    residual,
    tokens_of,
    without,
)


class WithoutReplacement:
    """Verify distinct siblings in draw order."""

    name = "without_replacement"
    exact_for = frozenset({Provenance.CHAIN, Provenance.IID, Provenance.WITHOUT_REPLACEMENT})
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use one coin a tested sibling, and one draw."""
        require(self, draft, law)
        tokens = tokens_of(draft.tree)
        children = [list(dict.fromkeys(nodes)) for nodes in draws_of(draft)]
        path: list[int] = []
        row = 0
        while children[row]:
            p = law.row(row)
            q = dense_q(draft.law, row - 1, like=p)
            for node in children[row]:
                if random.coin(acceptance(p, q, tokens[node])):
                    path.append(node)
                    row = node + 1
                    break
                p, q = residual(p, q), without(q, tokens[node])
            else:
                return Verdict(tuple(path), random.draw(p), Extra.RECOVERED)
        return Verdict(tuple(path), random.draw(law.row(row)), Extra.BONUS)
