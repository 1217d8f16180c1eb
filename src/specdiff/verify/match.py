"""match: the longest path of argmaxes. Exact at temperature 0 for a draft of any origin."""

from __future__ import annotations

from collections.abc import Callable

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, children_of, tokens_of


class Match:
    """Follow the target's argmax down the tree; where no child carries it, it is the recovered token."""

    name = "match"
    exact_for = frozenset(Provenance)
    greedy_only = True
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Accept while some child is the argmax of its parent's row; no randomness is used."""
        return follow(draft, law.choice)


def follow(draft: Draft, pick: Callable[[int], int]) -> Verdict:
    """Descend to the child that carries ``pick(row)`` until there is none; that token ends the round.

    Args:
        draft: the tree.
        pick: row index (0 = root, n + 1 = node n) -> token.
    """
    children = children_of(draft.tree)
    tokens = tokens_of(draft.tree)
    path: list[int] = []
    row = 0
    while True:
        token = pick(row)
        child = next((c for c in children[row] if tokens[c] == token), None)
        if child is None:
            extra = Extra.RECOVERED if children[row] else Extra.BONUS
            return Verdict(tuple(path), token, extra)
        path.append(child)
        row = child + 1
