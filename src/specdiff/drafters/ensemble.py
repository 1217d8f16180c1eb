"""Several drafters side by side: their drafts share one tree and one target pass, and the target's choice decides.

Which member is best for the next tokens is not predicted but seen: all members' paths are scored in one pass, and the
best of them by SpecDiff-2's self-selection score, or the walk's, is accepted. A merged tree carries no q.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Observation
from specdiff.errors import InputError
from specdiff.trees.paths import descend
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Shape, TokenTree


@dataclass(frozen=True)
class Member:
    """One drafter of an ensemble and its share of the budget, relative to the other members' shares."""

    drafter: Drafter
    share: float = 1.0


@dataclass(frozen=True)
class EnsembleDraft(Draft):
    """A merged tree that knows where its nodes came from.

    Attributes:
        members: names of the members that proposed each node, in the ensemble's order.
    """

    members: tuple[tuple[str, ...], ...] = ()

    def selected(self, path: Sequence[int]) -> tuple[str, ...]:
        """The members that proposed all of ``path`` (node ids, root down); none for the empty path."""
        return self.members[path[-1]] if path else ()

    def chosen(self, path: Sequence[int]) -> str:
        """The first member that proposed all of ``path``; the ensemble where nothing was accepted, as none was chosen.

        Args:
            path: accepted node ids, root down; may be empty.
        """
        names = self.selected(path)
        return names[0] if names else self.source


class EnsembleDrafter:
    """Members that draft for the same target, in the target's tokens.

    The budget's nodes (`BestFirst`) or chains (`Samples`) are shared out in the members' order; what a member leaves
    unused, for instance an n-gram without a match, goes to those after it. A member that cannot build the shape drafts
    one chain.

    Args:
        members: at least one, names distinct.
        name: used in records.
    """

    def __init__(self, members: Sequence[Member], *, name: str = "") -> None:
        names = [m.drafter.name for m in members]
        if not members or len(set(names)) < len(names):
            raise InputError.of(
                "members",
                expected="at least one drafter, of distinct names",
                got=names,
                remedy="give each drafter a name of its own",
            )
        if any(m.share <= 0 for m in members):
            raise InputError.of(
                "share",
                expected="numbers > 0",
                got=[m.share for m in members],
                remedy="leave a member out that shall not draft",
            )
        self.members = tuple(members)
        self.name = name or "+".join(names)
        self.vocab_size = max(m.drafter.vocab_size for m in members)
        limits = [m.drafter.max_gamma for m in members]
        self.max_gamma: int | None = None if None in limits else max(g for g in limits if g is not None)
        self.feature_layers = tuple(sorted({layer for m in members for layer in m.drafter.feature_layers}))

    def provenance(self, budget: Budget) -> Provenance:
        """FIXED: the merged tree carries no q.

        Raises:
            InputError: the shape cannot hold the drafts of several members.
        """
        if not isinstance(budget.shape, BestFirst | Samples):
            raise InputError.of(
                "shape",
                expected="BestFirst(nodes) or Samples(k) for an ensemble",
                got=budget.shape,
                remedy="several drafts make a tree; use BestFirst(nodes)",
            )
        for member in self.members:
            member_budget(member.drafter, budget, units(budget.shape))
        return Provenance.FIXED

    def open(self, rows: int) -> EnsembleSession:
        """Start a session for ``rows`` requests."""
        return EnsembleSession(self, rows)


class EnsembleSession:
    """One session a member.

    Attributes:
        selected: how often each member had proposed the whole accepted path (of the rounds it was told of; a path that
            several members proposed counts for each).
    """

    def __init__(self, drafter: EnsembleDrafter, rows: int) -> None:
        self._drafter = drafter
        self._sessions: list[DraftSession] = [m.drafter.open(rows) for m in drafter.members]
        self._drafts: dict[int, EnsembleDraft] = {}
        self.selected: Counter[str] = Counter()

    @property
    def passes(self) -> int:
        """Forward passes of all members so far."""
        return sum(session.passes for session in self._sessions)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One merged tree a request."""
        left = {r.row: units(r.budget.shape) for r in requests}
        drafts: dict[int, list[tuple[str, Draft]]] = {r.row: [] for r in requests}
        members = self._drafter.members
        for i, (member, session) in enumerate(zip(members, self._sessions, strict=True)):
            asked = []
            for r in requests:
                allotted = round(left[r.row] * member.share / sum(m.share for m in members[i:]))
                if allotted > 0:
                    asked.append(replace(r, budget=member_budget(member.drafter, r.budget, allotted)))
            for r, draft in zip(asked, session.propose(asked) if asked else [], strict=True):
                drafts[r.row].append((member.drafter.name, draft))
                left[r.row] -= used_units(draft, r.budget.shape)
        self._drafts = {row: merge_drafts(found, source=self._drafter.name) for row, found in drafts.items()}
        return [self._drafts[r.row] for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Count whose path was accepted, and tell every member, with the target features that it reads."""
        for o in observations:
            draft = self._drafts.get(o.row)
            if draft is not None and o.accepted:
                path = descend(draft.tree.tokens.tolist(), draft.tree.parents, o.tokens[: o.accepted])
                self.selected.update(draft.selected(path))
        for member, session in zip(self._drafter.members, self._sessions, strict=True):
            session.observe([replace(o, features=self._features(member, o.features)) for o in observations])

    def rewind(self, row: int, length: int) -> None:
        """Rewind every member."""
        for session in self._sessions:
            session.rewind(row, length)

    def _features(self, member: Member, features: Tensor | None) -> Tensor | None:
        if features is None or not member.drafter.feature_layers:
            return None
        layers = features.unflatten(-1, (len(self._drafter.feature_layers), -1))
        places = [self._drafter.feature_layers.index(layer) for layer in member.drafter.feature_layers]
        return layers[:, places].flatten(1)


def units(shape: Shape) -> int:
    """What the members share: nodes of a best-first tree, chains of a sampled one."""
    return shape.nodes if isinstance(shape, BestFirst) else shape.k if isinstance(shape, Samples) else 1


def used_units(draft: Draft, shape: Shape) -> int:
    """How many of its units a member's draft took up."""
    return len(draft.tree) if isinstance(shape, BestFirst) else len(draft.paths) or min(len(draft.tree), 1)


def member_budget(drafter: Drafter, budget: Budget, allotted: int) -> Budget:
    """One member's budget: ``allotted`` units, in its own window; one chain where it cannot build the shape.

    Raises:
        InputError: the member cannot even build a chain.
    """
    gamma = budget.gamma if drafter.max_gamma is None else min(budget.gamma, drafter.max_gamma)
    if isinstance(budget.shape, BestFirst):
        gamma = min(gamma, allotted)
    shape: Shape = BestFirst(allotted) if isinstance(budget.shape, BestFirst) else Samples(allotted)
    wished = replace(budget, gamma=gamma, shape=shape)
    try:
        drafter.provenance(wished)
    except InputError:
        wished = replace(wished, shape=Chain())
        drafter.provenance(wished)
    return wished


def merge_drafts(drafts: Sequence[tuple[str, Draft]], *, source: str) -> EnsembleDraft:
    """One tree of all nodes, equal paths merged.

    Args:
        drafts: each member's name and draft, in the ensemble's order.
        source: name of the ensemble.
    """
    tokens: list[int] = []
    parents: list[int] = []
    members: list[list[str]] = []
    nodes: dict[tuple[int, int], int] = {}
    for name, draft in drafts:
        merged = {-1: -1}  # the draft's nodes -> the tree's
        for node, (parent, token) in enumerate(zip(draft.tree.parents, draft.tree.tokens.tolist(), strict=True)):
            key = (merged[parent], token)
            merged[node] = nodes.setdefault(key, len(tokens))
            if merged[node] == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                members.append([])
            if name not in members[merged[node]]:
                members[merged[node]].append(name)
    tree = TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents))
    return EnsembleDraft(tree, source=source, members=tuple(map(tuple, members)))
