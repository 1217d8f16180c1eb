"""The vocabulary of the library: frozen data, no logic beyond validation.

* **target** ``p``: the autoregressive model whose text is produced. **drafter** ``q``: the model that guesses.
* **draft**: guessed continuations of the committed prefix, as a `TokenTree` (a chain is a tree).
* **accepted**: a drafted token that was committed. **recovered**: the target's own token after a rejection.
  **bonus**: the target's own token after a draft was accepted to its end.
* **gamma**: depth of the draft window. **tau**: committed tokens / decode passes of the target.

Shapes: N nodes of a tree, D draws, G gamma, V target vocabulary, W draft vocabulary, M rows of q.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdiff.checking import callable_or_none, flag, integer, real, sequence
from specdiff.errors import InputError


def ids_tensor(ids: Sequence[int]) -> Tensor:
    """Token ids as an int64 tensor; by way of numpy, several times cheaper than ``torch.tensor``, at any length."""
    return torch.from_numpy(np.array(ids, dtype=np.int64))  # pyright: ignore[reportUnknownMemberType]


class Provenance(enum.Enum):
    """How the tokens of a draft came about; rules declare for which they are exact."""

    FIXED = "fixed"
    """Any origin, drawn independently of the verifier's randomness; carries no q."""
    CHAIN = "chain"
    """ONE chain, each token sampled from its q row."""
    IID = "iid"
    """K siblings (here: chains) sampled independently from q, every draw kept, duplicates included, in draw order."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn without replacement from q, in draw order (= node order)."""


@dataclass(frozen=True)
class TokenTree:
    """A token tree under the last committed token, in topological order.

    Attributes:
        tokens: [N] int64 token ids (CPU).
        parents: parent node of each node, -1 for children of the root (the last committed token); parents[i] < i.
        depths: 1-based depth of each node.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1, "tokens must be [N]"
        assert self.tokens.dtype == torch.int64, "tokens must be int64"
        assert len(self.parents) == self.tokens.numel(), "one parent a node"
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            assert -1 <= parent < node, "parents must precede their children"
            depths.append(1 if parent < 0 else depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for the empty tree."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


@dataclass(frozen=True)
class DraftLaw:
    """The q rows that a sampled draft was drawn from, after draft temperature and filters.

    Attributes:
        rows: [M, W] probabilities, each row summing to 1, on any device.
        row_of: for the root (index 0) and every node n (index n + 1): the row that the CHILDREN of that node are drawn
            from, -1 where it has no row (leaves). One row a depth or one row a node are both expressed here.
        vocab: [W] sorted int64 target token ids of the columns, or None where W = V and column = id.
    """

    rows: Tensor
    row_of: tuple[int, ...]
    vocab: Tensor | None = None


@dataclass(frozen=True)
class Draft:
    """A token tree, how it came about, and the q that goes with it.

    Attributes:
        tree: the nodes the target scores.
        provenance: see `Provenance`; ``FIXED`` exactly where ``law`` is None.
        law: the q rows, for sampled drafts.
        paths: for ``CHAIN`` and ``IID``: the node ids of every draw, in draw order, each [<= G] long; the trie merges
            equal prefixes, the draws keep their multiplicity here. Empty otherwise.
        source: name of the drafter. See `chosen` for whose path it was in an ensemble.
        scores: log of the drafter's own probability of the path down to each node, where it knows it; else empty.
        generated: tokens before the first EOS of the raw argmax draft (the window's length where it has none); None
            where the drafter does not know, or was not asked (`Budget.raw_length`).
    """

    tree: TokenTree
    provenance: Provenance = Provenance.FIXED
    law: DraftLaw | None = None
    paths: tuple[tuple[int, ...], ...] = ()
    source: str = ""
    scores: tuple[float, ...] = ()
    generated: int | None = None

    def __post_init__(self) -> None:
        assert (self.provenance is Provenance.FIXED) == (self.law is None), "q comes exactly with sampled drafts"
        assert bool(self.paths) == (self.provenance in (Provenance.CHAIN, Provenance.IID)) or len(self.tree) == 0

    def chosen(self, path: Sequence[int]) -> str:
        """Name of the drafter whose path was accepted, for the records.

        Args:
            path: accepted node ids, root down; may be empty.
        """
        return self.source


class Extra(enum.Enum):
    """What the one token of the target's own is that ends each round."""

    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True)
class Verdict:
    """What a rule decided: the accepted path (node ids, root down), then one token of the target's own."""

    path: tuple[int, ...]
    token: int
    extra: Extra


@dataclass(frozen=True)
class Chain:
    """One chain: sampled from q, or the argmax chain for drafters without q."""


@dataclass(frozen=True)
class Samples:
    """K chains sampled independently from q, merged into a trie for the target pass (SpecDiff-2, section 5)."""

    k: int


@dataclass(frozen=True)
class Siblings:
    """``widths[d]`` children drawn without replacement under every node of depth d (Sequoia)."""

    widths: tuple[int, ...]


@dataclass(frozen=True)
class BestFirst:
    """The ``nodes`` nodes with the largest product of marginals (DDTree; docs/rules.md fact 5).

    Attributes:
        nodes: at most so many.
        size: how many of them to keep, from their scores in falling order (see `Draft.scores`); None = all. It sees the
            marginals and the past only, never the verifier's randomness, so the draft stays ``FIXED``.
    """

    nodes: int
    size: Callable[[Sequence[float]], int] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class CausalPaths:
    """The ``keep`` paths that marginals and a causal n-gram model agree on best, merged into a trie.

    Causal-consistency path search of DiffuSpec (arXiv 2510.02358; docs/diffuspec.md).

    Attributes:
        beam: width of the search. keep: paths that become the draft, at most ``beam``.
        mass, cap: at each position the smallest set of most probable tokens that has this mass may be taken, at most so
            many of them, and EOS.
        weight: of log q; the n-gram model's log p has the rest. At 1 no n-gram model is asked.

    Raises:
        InputError: a number is out of range.
    """

    beam: int = 3
    keep: int = 1
    mass: float = 0.8
    cap: int = 15
    weight: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("beam", self.beam), ("keep", self.keep), ("cap", self.cap)):
            integer(name, value, 1, remedy="the paper has beam 3, keep 1 and cap 15")
        if self.keep > self.beam:
            raise InputError.of("keep", expected=f"at most the beam's {self.beam}", got=self.keep, remedy="widen beam")
        real("mass", self.mass, lambda v: 0 < v <= 1, expected="a number in (0, 1]", remedy="the paper has 0.8")
        real("weight", self.weight, lambda v: 0 <= v <= 1, expected="a number in [0, 1]", remedy="the paper has 0.5")


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape is given node by node; EAGLE's (arXiv 2401.15077) is `EAGLE_TREE`.

    Attributes:
        paths: each node as the ranks from the root down to it: (0, 1) is the second child of the first child.
        sampled: children are drawn without replacement, so that rank is draw order and the draft carries q; otherwise
            they are the most probable tokens in falling order, and it does not.

    Raises:
        InputError: a node's parent or elder sibling is missing, or a node is given twice.
    """

    paths: tuple[tuple[int, ...], ...]
    sampled: bool = False

    def __post_init__(self) -> None:
        given = sequence("paths", self.paths, expected="a tuple of tuples of ranks", remedy="such as ((0,), (1,))")
        for path in given:
            for rank in sequence("paths", path, expected="ranks from the root down", remedy="such as (0, 1)"):
                integer("paths", rank, 0, remedy="ranks start at 0")
        nodes = set(self.paths)
        for path in self.paths:
            needed = [path[:-1]] if len(path) > 1 else []
            needed += [(*path[:-1], path[-1] - 1)] if path and path[-1] > 0 else []
            missing = [other for other in needed if other not in nodes]
            if not path or missing:
                raise InputError.of(
                    "paths",
                    expected="with every node its parent and its elder sibling",
                    got=f"{path} without {missing}",
                    remedy="add the missing nodes",
                )
        if len(nodes) < len(self.paths) or not nodes:
            raise InputError.of("paths", expected="nodes, each once", got=self.paths, remedy="name each node once")

    def within(self, depth: int) -> list[tuple[int, ...]]:
        """The nodes down to a depth, by depth, then in order of rank."""
        return sorted((p for p in self.paths if len(p) <= depth), key=lambda p: (len(p), p))


_PUBLISHED = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE_TREE = StaticTree(tuple(tuple(map(int, path)) for path in _PUBLISHED.split()))
"""The published tree of EAGLE: 26 nodes with the root, 25 of them drafted, five deep."""


@dataclass(frozen=True)
class DynamicTree:
    """The confidence tree of EAGLE-2 (arXiv 2406.16858): a beam, then its best nodes.

    At each depth the ``top`` nodes with the largest product of probabilities are expanded, each by its ``top`` most
    probable tokens; of all nodes met, the ``nodes`` best become the draft. The depth is the budget's gamma.

    Attributes:
        nodes: at most so many are kept. top: width of the beam, and children looked at under each of its nodes.

    Raises:
        InputError: a number is below 1.
    """

    nodes: int = 60
    top: int = 10

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("top", self.top)):
            integer(name, value, 1, remedy="the paper has 60 nodes and the top 10")


Shape = Chain | Samples | Siblings | BestFirst | CausalPaths | StaticTree | DynamicTree


def may_branch(shape: Shape) -> bool:
    """Whether drafts of this shape may have two children of one node."""
    if isinstance(shape, StaticTree):
        return any(any(path) for path in shape.paths)
    return not isinstance(shape, Chain) and not (isinstance(shape, CausalPaths) and shape.keep == 1)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one round may draft.

    Attributes:
        gamma: largest depth.
        shape: how marginals become a tree.
        temperature: draft temperature (> 0), separate from the target's.
        raw_length: whether drafts shall say how long the raw draft is (`Draft.generated`), which costs a pass over the
            marginals; path search knows it anyway.
    """

    gamma: int
    shape: Shape
    temperature: float = 1.0
    raw_length: bool = False

    def validate(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            InputError: gamma, a count or the draft temperature is out of range.
        """
        if not isinstance(self.shape, Shape):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of(
                "shape",
                expected="a Chain, Samples, Siblings, BestFirst, CausalPaths, StaticTree or DynamicTree",
                got=self.shape,
                remedy="make one of these",
            )
        counts: dict[str, object] = {"gamma": self.gamma}
        if isinstance(self.shape, Samples):
            counts["Samples.k"] = self.shape.k
        elif isinstance(self.shape, BestFirst):
            counts["BestFirst.nodes"] = self.shape.nodes
            callable_or_none("size", self.shape.size, remedy="pass a function from scores to a number of nodes")
        elif isinstance(self.shape, Siblings):
            widths = sequence("widths", self.shape.widths, expected="a tuple of integers", remedy="one for each depth")
            counts |= {f"widths[{i}]": w for i, w in enumerate(widths)} or {"widths": 0}
        for name, count in counts.items():
            integer(name, count, 1, remedy="draft at least one token")
        real(
            "draft temperature",
            self.temperature,
            lambda value: 0 < value < math.inf,
            expected="a finite number > 0",
            remedy="use a best-first tree for argmax drafts",
        )
        flag("raw_length", self.raw_length, remedy="say whether drafts tell the raw draft's length")


@dataclass(frozen=True, kw_only=True)
class Round:
    """Record of one round: one draft, one target pass, one verdict.

    Attributes:
        proposed: depth of the draft. nodes: tree size. accepted: drafted tokens committed.
        committed: all tokens committed, the extra one included where it was (EOS, a stop or the budget may cut).
        extra: kind of the extra token, None where it was cut off. rule: what verified. reason: why this rule.
        source: which drafter's path was accepted (see `Draft.chosen`).
        draft_seconds, target_seconds, verify_seconds: by the caller's clock, 0.0 without one.
        drafter_passes, target_passes: forward passes of each.
        start: tokens committed before the round, prompt included. path: the accepted nodes, root down.
    """

    proposed: int
    nodes: int
    accepted: int
    committed: int
    extra: Extra | None
    rule: str
    reason: str
    source: str
    drafter_passes: int
    target_passes: int = 1
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    start: int = 0
    path: tuple[int, ...] = ()
