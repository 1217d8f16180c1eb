r"""How large a product must be to enter the best-first tree: the B-th largest of all prefixes, many windows at once.

The best-first tree of B nodes over independent marginals holds the B prefixes with the largest products
(`specdiff.trees.best_first`), so a prefix with log product :math:`S` is in it if and only if :math:`S \ge T`, ties
aside, with :math:`T` the B-th largest log product over prefixes of all depths.

Exact and without enumeration: a prefix among the B best of its depth extends one among the B best of the depth before
(none has a larger product than its parent), by one of its row's B best tokens. More tightly, the pair (i-th best
prefix, r-th best token), counted from 1, is beaten by or equal to i * r pairs, so only pairs with i * r <= B matter:
about B log B sums a depth. The heap of `best_first` finds the same B prefixes one window at a time; this is what a loss
over hundreds of windows needs, it runs on any device, and it is differentiable in the log-probabilities. The tests hold
it against that heap.

Shape legend: A windows, G rows of a window, K top tokens of a row, B nodes.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def tree_threshold(top: Tensor, nodes: int) -> Tensor:
    """Return the log product of each window's B-th best prefix.

    Args:
        top: [A, G, K] each row's largest log q, falling; K at least min(B, D) or the result is too small.
        nodes: B.

    Returns:
        [A]; -inf where fewer than B prefixes have any probability, so that all of those are in the tree.
    """
    best = top[:, 0, :nodes]
    found = [best]
    for row in top.unbind(dim=1)[1:]:
        pairs = [
            (i, r)
            for i, r in itertools.product(range(best.shape[1]), range(row.shape[1]))
            if (i + 1) * (r + 1) <= nodes
        ]
        prefix, token = torch.tensor(pairs, device=top.device).unbind(dim=1)
        sums = best[:, prefix] + row[:, token]
        best = sums.topk(min(nodes, len(pairs)), dim=-1).values
        found.append(best)
    everything = torch.cat(found, dim=-1)
    if everything.shape[1] < nodes:
        return top.new_full(top.shape[:1], -math.inf)
    return everything.topk(nodes, dim=-1).values[:, -1]


def tree_threshold_reference(log_rows: Tensor, nodes: int) -> Tensor:
    """Return the same by enumerating every prefix, in float64 (`log_rows` is [A, G, D], tiny)."""
    thresholds: list[Tensor] = []
    for rows in log_rows.double():
        products = [
            torch.stack([rows[k, token] for k, token in enumerate(text)]).sum()
            for depth in range(1, rows.shape[0] + 1)
            for text in itertools.product(range(rows.shape[1]), repeat=depth)
        ]
        products.sort(key=lambda product: float(product.detach()), reverse=True)
        thresholds.append(products[nodes - 1] if len(products) >= nodes else rows.new_tensor(-math.inf))
    return torch.stack(thresholds)
