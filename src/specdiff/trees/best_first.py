"""best-first: the B nodes with the largest product of marginals (DDTree; docs/rules.md, fact 5).

With independent marginals these nodes form a tree, since no node has a larger product than its parent, and no tree of B
nodes has a larger expected accepted length under q. It depends on q only through its choice of nodes and is verified
without q (provenance ``FIXED``).

Shapes: G depth of the window, W draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.types import Draft, TokenTree, ids_tensor


def best_first(
    log_probs: Tensor,
    nodes: int,
    vocab: Tensor | None = None,
    *,
    size: Callable[[Sequence[float]], int] | None = None,
    source: str = "",
) -> Draft:
    """Grow the tree by a heap over successors: the next sibling by rank, and the best child.

    Each node enters the heap once and the vocabulary is never enumerated: rank B of a row cannot be among the B best
    nodes, so the top min(W, B) of each row are enough. Nodes of probability zero are left out.

    Args:
        log_probs: [G, W] log-probabilities of the window's positions.
        nodes: B, the number of nodes.
        vocab: [W] sorted target ids, None where column = id.
        size: how many nodes to keep, from their log products in falling order; None = all.
        source: name of the drafter.

    Returns:
        A draft of at most B nodes, in falling order of their product; ties are broken by who was found first.
    """
    if nodes < 1:
        raise InputError.of("nodes", expected="an integer >= 1", got=nodes, remedy="give the tree at least one node")
    columns: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    if log_probs.numel() > 0:
        top = torch.topk(log_probs, k=min(log_probs.shape[-1], nodes), dim=-1)
        gains = cast("list[list[float]]", top.values.tolist())  # pyright: ignore[reportUnknownMemberType]
        ids = cast("list[list[int]]", top.indices.tolist())  # pyright: ignore[reportUnknownMemberType]
        found = 0  # ties: the node found first; it also keeps the heap from comparing further
        # (minus log product, found, parent node, depth - 1, rank, log product of the parent)
        heap: list[tuple[float, int, int, int, int, float]] = [(-gains[0][0], found, -1, 0, 0, 0.0)]
        while heap and len(columns) < nodes:
            cost, _, parent, row, rank, above = heapq.heappop(heap)
            if cost == math.inf:
                break
            node = len(columns)
            columns.append(ids[row][rank])
            parents.append(parent)
            scores.append(-cost)
            if rank + 1 < len(gains[row]):
                found += 1
                heapq.heappush(heap, (-(above + gains[row][rank + 1]), found, parent, row, rank + 1, above))
            if row + 1 < len(gains):
                found += 1
                heapq.heappush(heap, (cost - gains[row + 1][0], found, node, row + 1, 0, -cost))
    kept = len(columns) if size is None else size(scores)
    tokens = ids_tensor(columns[:kept])
    tree = TokenTree(tokens if vocab is None else vocab.cpu()[tokens], tuple(parents[:kept]))
    return Draft(tree, source=source, scores=tuple(scores[:kept]))
