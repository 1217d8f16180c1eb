"""self-selection: keep the draft that the target likes best, then point mass (SpecDiff-2, 2511.00606, algorithm 1).

Exact for drafts of any origin: which path is best depends on the draft and on p, not on the verifier's randomness. The
walk needs the same rows of p and accepts at least as much, draw by draw (docs/rules.md, fact 2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specdiff.randomness import Random
from specdiff.trees.paths import leaf_paths
from specdiff.types import Draft, Provenance, TokenTree, Verdict
from specdiff.verify.base import TargetLaw, children_of, probabilities_of, tokens_of
from specdiff.verify.point_mass import accept_path

_ROUNDING = 1e-5  # a float32 row may add up to a little more than 1


class SelfSelection:
    """Score every draft with the target's own path probabilities; verify the best, the first one on ties."""

    name = "self_selection"
    exact_for = frozenset(Provenance)
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Score, select, then use one coin a visited token, and one draw."""
        paths = draft.paths or leaf_paths(draft.tree.parents)
        best = best_path(paths, draft.tree, law) if paths else ()
        return accept_path(best, draft, law, random)


def best_path(paths: Sequence[Sequence[int]], tree: TokenTree, law: TargetLaw) -> Sequence[int]:
    """The path of largest score, sum_j prod_{k<=j} p(x_k | s, x_<k): the expected number of its accepted tokens.

    A path whose first m tokens have the sum S and the product R ends below S + R (its length - m), so those that cannot
    win are left where they are, and a row of p is asked for only if a path through it still may.

    Args:
        paths: node ids, root down; the first one wins ties.
    """
    tokens, children = tokens_of(tree), children_of(tree)
    steps: dict[int, float] = {}  # p(x | the path above) of a node

    def step(node: int) -> float:
        if node not in steps:
            row = tree.parents[node] + 1
            siblings = children[row]
            steps.update(zip(siblings, probabilities_of([tokens[n] for n in siblings], law.row(row)), strict=True))
        return steps[node]

    # (minus the most a path can score, which path, its tokens seen, their sum, their product)
    open_paths = [(-len(path) * (1 + _ROUNDING), i, 0, 0.0, 1.0) for i, path in enumerate(paths)]
    heapq.heapify(open_paths)
    while True:
        _, i, seen, total, reach = heapq.heappop(open_paths)
        path = paths[i]
        if seen == len(path):
            return path
        reach *= step(path[seen])
        total += reach
        seen = seen + 1 if reach > 0 else len(path)
        rest = reach * (len(path) - seen)
        most = total if rest == 0 else (total + rest) * (1 + _ROUNDING)
        heapq.heappush(open_paths, (-most, i, seen, total, reach))
