"""What a verification rule is.

A rule is a pure function of a draft, the target's law at every node and a source of random decisions. It knows no
model, no drafter and no global generator, and it declares for which drafts it is exact; `check` refuses the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from specdiff.errors import PairingError
from specdiff.randomness import Random
from specdiff.types import Draft, DraftLaw, Provenance, TokenTree, Verdict


class TargetLaw(Protocol):
    """The law p of plain sampling at the root and at every node: row 0 is the root's, row n + 1 node n's.

    Attributes:
        greedy: whether every row is one-hot (temperature 0).
    """

    greedy: bool

    def row(self, index: int) -> Tensor:
        """Probabilities [V] of one row (float32 or float64, summing to 1); at temperature 0 one-hot."""
        ...

    def choice(self, index: int) -> int:
        """The most probable token of one row; the only one at temperature 0."""
        ...


class Rule(Protocol):
    """A verification rule.

    Attributes:
        name: the name used in code, CLI and reports.
        exact_for: provenances for which the committed law equals p at every temperature.
        greedy_only: whether the rule is exact at temperature 0 only (then for drafts of any provenance).
        needs_chain: whether the rule looks at one path only, so that the shape of the draft must not branch.
    """

    name: str
    exact_for: frozenset[Provenance]
    greedy_only: bool
    needs_chain: bool

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Return the accepted path and the one extra token."""
        ...


def check(rule: Rule, provenance: Provenance, *, greedy: bool, tree: bool = False) -> None:
    """Refuse a rule that is not exact for drafts of this provenance, or not made for their shape.

    Args:
        rule: the rule asked for.
        provenance: of the drafts to come.
        greedy: whether the target runs at temperature 0.
        tree: whether the shape asked for may branch (known before the draft, never read off a sampled one).

    Raises:
        PairingError: naming the rule, the draft's provenance and the rules that fit.
    """
    if rule.greedy_only and not greedy:
        raise PairingError.of(
            "rule",
            expected="a rule that is exact at temperature > 0",
            got=rule.name,
            remedy="use rule='auto' or rule='walk', or temperature 0",
        )
    if provenance not in rule.exact_for:
        fits = ", ".join(sorted(p.value for p in rule.exact_for))
        raise PairingError.of(
            "rule",
            expected=f"a rule that is exact for a {provenance.value!r} draft",
            got=rule.name,
            remedy=f"{rule.name} is exact for: {fits}; use rule='auto', or a draft shape that {rule.name} fits",
        )
    if rule.needs_chain and tree:
        raise PairingError.of(
            "rule",
            expected="a rule that verifies trees, as this draft may branch",
            got=rule.name,
            remedy="use rule='walk', which accepts at least as much on any tree, or a chain-shaped draft",
        )


def require(rule: Rule, draft: Draft, law: TargetLaw) -> None:
    """Refuse, inside a rule, a draft that the rule is not exact for; the empty draft fits every rule."""
    if len(draft.tree) > 0:
        check(rule, draft.provenance, greedy=law.greedy)


def tokens_of(tree: TokenTree) -> list[int]:
    """The token of every node."""
    return cast("list[int]", tree.tokens.tolist())  # pyright: ignore[reportUnknownMemberType] - torch's stub


def children_of(tree: TokenTree) -> list[list[int]]:
    """Children of the root (index 0) and of every node n (index n + 1), in node order."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        children[parent + 1].append(node)
    return children


def draws_of(draft: Draft) -> list[list[int]]:
    """The draws under the root (index 0) and every node n (index n + 1), as child nodes, in draw order.

    A child that was drawn twice is listed twice. Without listed paths, node order is draw order.
    """
    if not draft.paths:
        return children_of(draft.tree)
    draws: list[list[int]] = [[] for _ in range(len(draft.tree) + 1)]
    for path in draft.paths:
        for parent, node in zip((-1, *path), path, strict=False):
            draws[parent + 1].append(node)
    return draws


def probabilities_of(tokens: Sequence[int], p: Tensor) -> list[float]:
    """p(x) of some tokens; one transfer where p is on another device."""
    if p.device.type != "cpu":
        return cast("list[float]", p[list(tokens)].tolist())  # pyright: ignore[reportUnknownMemberType]
    row = p.numpy(force=True)  # costs a tenth of indexing a tensor by a list
    return [float(row[token]) for token in tokens]


def dense_q(law: DraftLaw | None, node: int, like: Tensor) -> Tensor:
    """The q row [V] that the children of ``node`` (-1: the root) were drawn from, dense, on the device of ``like``."""
    assert law is not None, "a draft without q reached a rule that uses q: call check first"
    row = law.rows[law.row_of[node + 1]]
    if row.dtype != like.dtype or row.device != like.device:
        row = row.to(device=like.device, dtype=like.dtype)
    if law.vocab is None:
        return row
    dense = like.new_zeros(like.shape)
    dense[law.vocab.to(like.device)] = row
    return dense


def acceptance(p: Tensor, q: Tensor, token: int) -> float:
    """p(x) / q(x) for the drawn token x (a probability above 1 counts as 1).

    A token that q cannot have drawn (its probability underflowed in this dtype) is rejected: the residual then emits it
    where p wants it.
    """
    drawn = q[token].item()
    return p[token].item() / drawn if drawn > 0 else 0.0


def positive_part(weights: Tensor, fallback: Tensor) -> Tensor:
    """Clamp ``weights`` at 0; ``fallback`` where nothing is left (p = q up to rounding: the residual is not needed)."""
    clamped = weights.clamp_min(0)
    return clamped if clamped.sum().item() > 0 else fallback


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law left after a rejection, norm (p - q)+ [V]."""
    left = positive_part(p - q, fallback=p)
    return left / left.sum()


def keep(rate: float, left: float) -> float:
    """Probability of ending at a node all of whose examined children were rejected, S / (S + 1 - a).

    Args:
        rate: a, the probability with which the path down to the node counts as accepted.
        left: S = sum (a p - q)+.

    Returns:
        1 where a = 1, so the root is always kept (Sun et al. 2403.10444).
    """
    denominator = left + (1.0 - rate)  # in this order: exactly ``left`` at rate 1
    return left / denominator if denominator > 0 else 1.0


def without(weights: Tensor, token: int) -> Tensor:
    """``weights`` [V] with ``token`` taken out, renormalised; all zeros where nothing is left."""
    rest = weights.clone()
    rest[token] = 0
    total = rest.sum()
    return rest / total if total.item() > 0 else rest
