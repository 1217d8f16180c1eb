"""Paths of token trees: following given tokens down, and listing them all."""

from __future__ import annotations

from collections.abc import Sequence


def descend(tokens: Sequence[int], parents: Sequence[int], line: Sequence[int]) -> list[int]:
    """The nodes that ``line`` runs through from the root down, as far as it can be followed.

    Args:
        tokens: token of each node; siblings are distinct.
        parents: parent of each node, -1 for children of the root.
        line: tokens after the root.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    for token in line:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root down to each leaf, leaves in node order.

    Args:
        parents: parent of each node, -1 for children of the root.
    """
    inner = set(parents)
    lines: list[list[int]] = []
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        lines.append([*(lines[parent] if parent >= 0 else ()), node])
        if node not in inner:
            paths.append(lines[node])
    return paths
