"""point mass: accept x with probability p(x), else draw from p without x ("greedy acceptance", SpecDiff-2 2511.00606).

It is the ratio rule for a q that puts all its mass on x, so x may come from anywhere; nothing is known of the true q.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdiff.errors import PairingError
from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, positive_part, tokens_of, without


class PointMass:
    """Verify one chain of any origin."""

    name = "point_mass"
    exact_for = frozenset(Provenance)
    greedy_only = False
    needs_chain = True

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use one coin a visited token, and one draw.

        Raises:
            PairingError: the draft's tree branches.
        """
        if not draft.tree.is_chain:
            raise PairingError.of(
                "draft",
                expected="a chain (point_mass looks at one path only)",
                got=f"{len(draft.tree)} nodes",
                remedy="use rule='walk', which accepts at least as much on any tree, or a chain-shaped draft",
            )
        return accept_path(range(len(draft.tree)), draft, law, random)


def accept_path(path: Sequence[int], draft: Draft, law: TargetLaw, random: Random) -> Verdict:
    """Point-mass acceptance down one root-down path of node ids."""
    tokens = tokens_of(draft.tree)
    row = 0
    for depth, node in enumerate(path):
        token, p = tokens[node], law.row(row)
        if not random.coin(p[token].item()):
            # p(x) = 1 up to rounding leaves nothing; x itself is then as good as certain
            rest = positive_part(without(p, token), fallback=p)
            return Verdict(tuple(path[:depth]), random.draw(rest), Extra.RECOVERED)
        row = node + 1
    return Verdict(tuple(path), random.draw(law.row(row)), Extra.BONUS)
