"""Targets and drafts for the exact tests: small laws that are hard in one way each, and every way of drafting."""

from __future__ import annotations

import itertools
import random as plain_random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdiff.randomness import Random
from specdiff.trees.sampled import merge
from specdiff.types import Draft, DraftLaw, Provenance, TokenTree

from .enumeration import Table

Pair = Callable[[plain_random.Random, int], tuple[list[float], list[float]]]
"""Makes one row of p and one of q over V tokens."""


def normal(weights: Sequence[float]) -> list[float]:
    """Weights as probabilities."""
    total = sum(weights)
    return [w / total for w in weights]


def dirichlet(rng: plain_random.Random, vocab: int, concentration: float) -> list[float]:
    """A Dirichlet row."""
    return normal([rng.gammavariate(concentration, 1.0) + 1e-9 for _ in range(vocab)])


def one_hot(vocab: int, token: int) -> list[float]:
    """All mass on one token."""
    return [float(t == token) for t in range(vocab)]


def flat(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Both near uniform."""
    return dirichlet(rng, vocab, 4.0), dirichlet(rng, vocab, 4.0)


def sharp(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Both peaked, at different places."""
    return dirichlet(rng, vocab, 0.2), dirichlet(rng, vocab, 0.2)


def disjoint(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """No token that both could emit."""
    half = vocab // 2
    p = normal([rng.random() + 0.1 if t < half else 0.0 for t in range(vocab)])
    return p, normal([0.0 if t < half else rng.random() + 0.1 for t in range(vocab)])


def overlapping(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Each side has a token that the other cannot emit."""
    p, q = dirichlet(rng, vocab, 1.0), dirichlet(rng, vocab, 1.0)
    p[0], q[-1] = 0.0, 0.0
    return normal(p), normal(q)


def one_hot_p(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Temperature 0 on the target's side."""
    return one_hot(vocab, rng.randrange(vocab)), dirichlet(rng, vocab, 1.0)


def one_hot_q(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Temperature 0 on the drafter's side."""
    return dirichlet(rng, vocab, 1.0), one_hot(vocab, rng.randrange(vocab))


def one_hot_both(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Temperature 0 on both sides, agreeing half of the time."""
    token = rng.randrange(vocab)
    return one_hot(vocab, token), one_hot(vocab, token if rng.random() < 0.5 else (token + 1) % vocab)


def extreme_ratios(rng: plain_random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """One token with p/q = 1e-3 and one with p/q = 1e3."""
    rest = [rng.random() + 0.1 for _ in range(vocab - 2)]
    low, high = rng.sample(range(vocab), 2)
    p, q = ([0.0] * vocab for _ in range(2))
    p[low], q[low] = 3e-4, 0.3
    p[high], q[high] = 0.3, 3e-4
    others = [t for t in range(vocab) if t not in (low, high)]
    for token, share in zip(others, normal(rest) if rest else [], strict=True):
        p[token] = q[token] = 0.6997 * share
    return normal(p), normal(q)


PAIRS: dict[str, Pair] = {
    f.__name__: f for f in (flat, sharp, disjoint, overlapping, one_hot_p, one_hot_q, one_hot_both, extreme_ratios)
}


def prefixes(vocab: int, length: int) -> list[tuple[int, ...]]:
    """All token sequences shorter than ``length``."""
    return [prefix for size in range(length) for prefix in itertools.product(range(vocab), repeat=size)]


def tensor(row: Sequence[float]) -> Tensor:
    """A float64 row."""
    return torch.tensor(row, dtype=torch.float64)


def tables(pair: Pair, vocab: int, gamma: int, seed: int = 0) -> tuple[Table, dict[tuple[int, ...], Tensor]]:
    """A target, and a drafter with a row of its own for every prefix."""
    rng = plain_random.Random(f"{pair.__name__}/{vocab}/{gamma}/{seed}")
    p: dict[tuple[int, ...], Tensor] = {}
    q: dict[tuple[int, ...], Tensor] = {}
    for prefix in prefixes(vocab, gamma + 1):
        p_row, q_row = pair(rng, vocab)
        p[prefix], q[prefix] = tensor(p_row), tensor(q_row)
    return Table(p, gamma + 1), q


def marginals(q: dict[tuple[int, ...], Tensor], gamma: int) -> Tensor:
    """[gamma, V]: the rows of the all-zero prefixes, as if positions were independent."""
    return torch.stack([q[(0,) * depth] for depth in range(gamma)])


def equal_tables(vocab: int, gamma: int, seed: int = 0) -> tuple[Table, dict[tuple[int, ...], Tensor]]:
    """q = p, exactly, at every prefix."""
    target, _ = tables(flat, vocab, gamma, seed)
    return target, target.rows


def autoregressive(
    q: dict[tuple[int, ...], Tensor], gamma: int, draws: int, provenance: Provenance, *, stop: int | None = None
) -> Callable[[Random], Draft]:
    """A sampler of chains whose rows depend on the tokens drawn before; ``stop`` ends a chain (ragged tries)."""

    def sample(random: Random) -> Draft:
        chains: list[list[int]] = []
        for _ in range(draws):
            chain: list[int] = []
            while len(chain) < gamma and (not chain or chain[-1] != stop):
                chain.append(random.draw(q[tuple(chain)]))
            chains.append(chain)
        tokens, parents, paths = merge(chains)
        tree = TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents))
        return Draft(tree, provenance, node_rows(tree, q, gamma), tuple(paths))

    return sample


def autoregressive_siblings(q: dict[tuple[int, ...], Tensor], widths: Sequence[int]) -> Callable[[Random], Draft]:
    """A sampler of siblings without replacement whose rows depend on the tokens drawn before."""

    def sample(random: Random) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        level: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
        for width in widths:
            below: list[tuple[int, tuple[int, ...]]] = []
            for parent, prefix in level:
                drawn: list[int] = []
                for _ in range(min(width, int((q[prefix] > 0).sum()))):
                    drawn.append(random.draw(q[prefix], drawn))
                    below.append((len(tokens), (*prefix, drawn[-1])))
                    tokens.append(drawn[-1])
                    parents.append(parent)
            level = below
        tree = TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents))
        return Draft(tree, Provenance.WITHOUT_REPLACEMENT, node_rows(tree, q, len(widths)))

    return sample


def node_rows(tree: TokenTree, q: dict[tuple[int, ...], Tensor], gamma: int) -> DraftLaw:
    """One q row for the root and every node above the last depth."""
    seen: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        seen.append((*seen[parent + 1], token))
    with_row = [prefix for prefix in seen if len(prefix) < gamma]
    index = {prefix: row for row, prefix in enumerate(with_row)}
    return DraftLaw(torch.stack([q[prefix] for prefix in with_row]), tuple(index.get(prefix, -1) for prefix in seen))


def fixed_tree(*paths: Sequence[int]) -> Draft:
    """A tree of given paths, of no known origin."""
    tokens, parents, _ = merge(paths)
    return Draft(TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents)))
