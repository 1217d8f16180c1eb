"""Drafts sampled from marginals: one chain, K merged chains, or siblings without replacement.

The positions of a one-step draft are independent given the prefix, so each row of marginals is the true conditional of
its position and row j is the q of every node of depth j + 1 (docs/rules.md, fact 1).

Shapes: G depth of the window, W draft vocabulary, K draws, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from specdiff.errors import InputError
from specdiff.randomness import Cdf, Random
from specdiff.types import Draft, DraftLaw, Provenance, TokenTree, ids_tensor


def sample_chain(probs: Tensor, random: Random, vocab: Tensor | None = None, *, source: str = "") -> Draft:
    """One chain, each token drawn from its row.

    Args:
        probs: [G, W] rows summing to 1.
        random: the draft stream.
        vocab: [W] sorted target ids, None where column = id.
        source: name of the drafter.
    """
    columns = [random.draw(row) for row in probs]
    return _from_paths([columns], probs, vocab, Provenance.CHAIN, source)


def sample_paths(probs: Tensor, k: int, random: Random, vocab: Tensor | None = None, *, source: str = "") -> Draft:
    """K independent chains, merged into a trie; ``paths`` keeps every draw, duplicates included, in draw order.

    Args:
        probs: [G, W] rows summing to 1.
        k: number of draws.
        random: the draft stream.
        vocab: [W] sorted target ids, None where column = id.
        source: name of the drafter.
    """
    if k < 1:
        raise InputError.of("k", expected="an integer >= 1", got=k, remedy="draw at least one chain")
    drawn = [[random.draw(cdf) for _ in range(k)] for cdf in Cdf.of_rows(probs)]
    chains = [[position[draw] for position in drawn] for draw in range(k)]
    return _from_paths(chains, probs, vocab, Provenance.IID, source)


def siblings_without_replacement(
    probs: Tensor, widths: Sequence[int], random: Random, vocab: Tensor | None = None, *, source: str = ""
) -> Draft:
    """Under every node of depth d, ``widths[d]`` distinct children drawn from row d without replacement.

    Fewer children where the row has fewer tokens of positive probability. Nodes are ordered by depth; siblings are in
    draw order. The tree is min(G, len(widths)) deep.

    Args:
        probs: [G, W] rows summing to 1.
        widths: children a node, root first.
        random: the draft stream.
        vocab: [W] sorted target ids, None where column = id.
        source: name of the drafter.
    """
    if not widths or min(widths) < 1:
        raise InputError.of("widths", expected="integers >= 1", got=tuple(widths), remedy="give one width a depth")
    columns: list[int] = []
    parents: list[int] = []
    row_of = [-1]
    level = [-1]
    used = probs[: len(widths)]
    possible = cast("list[int]", (used > 0).sum(dim=-1).tolist())  # pyright: ignore[reportUnknownMemberType]
    for depth, (width, cdf) in enumerate(zip(widths, Cdf.of_rows(used), strict=False)):
        width = min(width, possible[depth])
        below: list[int] = []
        for parent in level:
            row_of[parent + 1] = depth
            siblings: list[int] = []
            for _ in range(width):
                siblings.append(random.draw(cdf, without=siblings))
            below.extend(range(len(columns), len(columns) + width))
            columns.extend(siblings)
            parents.extend([parent] * width)
            row_of.extend([-1] * width)
        level = below
    tree = TokenTree(_ids(columns, vocab), tuple(parents))
    return Draft(tree, Provenance.WITHOUT_REPLACEMENT, DraftLaw(probs, tuple(row_of), vocab), source=source)


def merge(chains: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Merge equal prefixes of chains into a trie.

    Args:
        chains: K token sequences, of any lengths.

    Returns:
        Tokens [N] and parents [N] of the nodes, and the node ids of every chain, in the given order.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    paths: list[tuple[int, ...]] = []
    for chain in chains:
        path: list[int] = []
        parent = -1
        for token in chain:
            node = nodes.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            path.append(node)
            parent = node
        paths.append(tuple(path))
    return tokens, parents, paths


def _from_paths(
    chains: Sequence[Sequence[int]], probs: Tensor, vocab: Tensor | None, provenance: Provenance, source: str
) -> Draft:
    columns, parents, paths = merge(chains)
    tree = TokenTree(_ids(columns, vocab), tuple(parents))
    rows = len(probs)
    row_of = tuple(depth if depth < rows else -1 for depth in (0, *tree.depths))
    return Draft(tree, provenance, DraftLaw(probs, row_of, vocab), tuple(paths), source)


def _ids(columns: Sequence[int], vocab: Tensor | None) -> Tensor:
    ids = ids_tensor(columns)
    return ids if vocab is None else vocab.cpu()[ids]
