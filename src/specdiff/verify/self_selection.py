"""self-selection: keep the draft that the target likes best, then point mass (SpecDiff-2, 2511.00606, algorithm 1).

Exact for drafts of any origin: which path is best depends on the draft and on p, not on the verifier's randomness. The
walk needs the same rows of p and accepts at least as much, draw by draw (docs/rules.md, fact 2).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdiff.randomness import Random
from specdiff.trees.paths import leaf_paths
from specdiff.types import Draft, Provenance, Verdict
from specdiff.verify.base import TargetLaw, children_of, probabilities_of, tokens_of
from specdiff.verify.point_mass import accept_path


class SelfSelection:
    """Score every draft with the target's own path probabilities; verify the best, the first one on ties."""

    name = "self_selection"
    exact_for = frozenset(Provenance)
    greedy_only = False
    needs_chain = False

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Score, select, then use one coin a visited token, and one draw."""
        paths = draft.paths or leaf_paths(draft.tree.parents)
        if not paths:
            return accept_path((), draft, law, random)
        reach = path_probabilities(draft, law)
        best = max(paths, key=lambda path: score(path, reach))
        return accept_path(best, draft, law, random)


def score(path: Sequence[int], reach: Sequence[float]) -> float:
    """sum_j prod_{k<=j} p(x_k | s, x_<k): the expected number of accepted tokens of ``path``.

    Args:
        path: node ids, root down.
        reach: probability of the path down to each node, see `path_probabilities`.
    """
    return sum(reach[node] for node in path)


def path_probabilities(draft: Draft, law: TargetLaw) -> list[float]:
    """Product of p along the path down to each node; rows below a node that p cannot reach are not asked for."""
    reach = [0.0] * len(draft.tree)
    tokens = tokens_of(draft.tree)
    for row, nodes in enumerate(children_of(draft.tree)):
        above = reach[row - 1] if row else 1.0
        if nodes and above > 0:
            steps = probabilities_of([tokens[node] for node in nodes], law.row(row))
            for node, step in zip(nodes, steps, strict=True):
                reach[node] = above * step
    return reach
