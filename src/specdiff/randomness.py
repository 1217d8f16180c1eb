"""Randomness as an argument.

Rules and draft builders are programs over two primitives, ``coin`` and ``draw``. In production a `RandomStream`
answers them from one seeded generator a request and purpose; given uniforms answer them through `Uniforms`; the exact
tests answer them by enumerating every outcome with its probability, so what they prove is the production code itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor


class Random(Protocol):
    """Source of random decisions. Each call is independent of every other call."""

    def coin(self, probability: float) -> bool:
        """Return True with the given probability (values outside [0, 1] act as the nearer bound)."""
        ...

    def draw(self, weights: Tensor) -> int:
        """Return index i of ``weights`` [V] (non-negative, positive sum) with probability weights[i] / sum."""
        ...


def inverse_cdf(weights: Tensor, uniform: float) -> int:
    """Index of the inverse CDF of ``weights`` at ``uniform``; the one place where a uniform becomes a token.

    Args:
        weights: [V] non-negative weights with a positive, finite sum; need not be normalised.
        uniform: a number in [0, 1).

    Returns:
        The smallest i with ``uniform * sum < cumsum[i]``, so a token of weight zero is never returned.
    """
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    threshold = cumulative[-1] * uniform
    # right=True: first index whose cumulative weight EXCEEDS the threshold, skipping zero-weight tokens.
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    if index >= weights.numel():  # uniform * sum rounded up to the sum: the last token that has weight
        index = int(torch.nonzero(weights > 0)[-1])
    return index


class Uniforms:
    """Answers from an explicit sequence of uniforms in [0, 1), one for each call, in order.

    Raises:
        StopIteration: more decisions were asked for than uniforms were given.
    """

    def __init__(self, uniforms: Iterable[float]) -> None:
        self._uniforms: Iterator[float] = iter(uniforms)

    def coin(self, probability: float) -> bool:
        """True if the next uniform is below ``probability``."""
        return next(self._uniforms) < probability

    def draw(self, weights: Tensor) -> int:
        """Inverse CDF of ``weights`` at the next uniform."""
        return inverse_cdf(weights, next(self._uniforms))


class RandomStream(Uniforms):
    """Endless float64 uniforms of one request and one purpose (``"draft"``, ``"verify"``).

    The stream depends on (seed, request, purpose) only, hence neither on the batch, nor on streaming, nor on how many
    decisions another purpose took.
    """

    _BLOCK = 64

    def __init__(self, seed: int, purpose: str, request: int = 0) -> None:
        digest = hashlib.blake2b(f"{seed}/{request}/{purpose}".encode(), digest_size=8).digest()
        self._generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
        super().__init__(self._endless())

    def _endless(self) -> Iterator[float]:
        while True:
            yield from torch.rand(self._BLOCK, dtype=torch.float64, generator=self._generator).tolist()

    def many(self, count: int) -> Tensor:
        """The next ``count`` uniforms as a float64 tensor [count]."""
        return torch.tensor([next(self._uniforms) for _ in range(count)], dtype=torch.float64)
