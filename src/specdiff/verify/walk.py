"""walk: draw y from p at the node; follow the child that carries y, else emit y.

Exact for ANY tree that does not depend on the verifier's randomness, since the emitted tokens are plain draws from p;
optimal for fixed trees (docs/rules.md, fact 3). SpecInfer calls it naive sampling; EAGLE and DDTree use it.
"""

from __future__ import annotations

from specdiff.randomness import Random
from specdiff.types import Draft, Provenance, Verdict
from specdiff.verify.base import TargetLaw
from specdiff.verify.match import follow


class Walk:
    """Plain sampling that happens to be pre-computed wherever the tree contains the draw."""

    name = "walk"
    exact_for = frozenset(Provenance)
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Use one draw a visited node."""
        if law.greedy:
            return follow(draft, law.choice)
        return follow(draft, lambda row: random.draw(law.row(row)))
