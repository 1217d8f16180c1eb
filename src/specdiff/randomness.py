"""Randomness as an argument.

Rules and draft builders are programs over two primitives, ``coin`` and ``draw``. In production a `RandomStream`
answers them from one seeded generator a request and purpose; given uniforms answer them through `Uniforms`; the exact
tests answer them by enumerating every outcome with its probability, so what they prove is the production code itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor


class Random(Protocol):
    """Source of random decisions. Each call is independent of every other call."""

    def coin(self, probability: float) -> bool:
        """Return True with the given probability (values outside [0, 1] act as the nearer bound)."""
        ...

    def draw(self, weights: Tensor | Cdf, without: Sequence[int] = ()) -> int:
        """Return index i of ``weights`` [V] with probability weights[i] / sum, the indices in ``without`` left out.

        The weights are non-negative and have a positive sum outside ``without``.
        """
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


class Cdf:
    """Weights whose cumulative sum is computed once, for many draws from one row, with or without replacement.

    Args:
        weights: [W] non-negative weights with a positive, finite sum, on any device; need not be normalised.
    """

    # Below this share of the total, the mass left after taking indices out is recomputed instead of subtracted.
    _CANCELLATION = 1e-6

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self._cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64).cpu()
        self._total = float(self._cumulative[-1])

    def index(self, uniform: float, without: Sequence[int] = ()) -> int:
        """Inverse CDF at ``uniform`` in [0, 1) of the weights with those at ``without`` set to zero."""
        taken = sorted(without)
        ends = [(float(self._cumulative[i - 1]) if i else 0.0, float(self._cumulative[i])) for i in taken]
        mass = self._total - sum(end - start for start, end in ends)
        if taken and mass < self._CANCELLATION * self._total:
            return inverse_cdf(self.masked(taken), uniform)
        threshold = mass * uniform
        for start, end in ends:  # step over every taken interval that lies below the threshold
            if threshold >= start:
                threshold = max(threshold + (end - start), end)
        index = int(torch.searchsorted(self._cumulative, threshold, right=True))
        if index >= self.weights.numel():  # rounded up to the total: the last index that has weight
            index = int(torch.nonzero(self.masked(taken) > 0)[-1])
        return index

    def masked(self, without: Sequence[int]) -> Tensor:
        """The weights [W] with those at ``without`` set to zero."""
        masked = self.weights.clone()
        masked[list(without)] = 0
        return masked


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

    def draw(self, weights: Tensor | Cdf, without: Sequence[int] = ()) -> int:
        """Inverse CDF of ``weights``, less ``without``, at the next uniform."""
        uniform = next(self._uniforms)
        if isinstance(weights, Cdf):
            return weights.index(uniform, without)
        return Cdf(weights).index(uniform, without) if without else inverse_cdf(weights, uniform)


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
            block = torch.rand(self._BLOCK, dtype=torch.float64, generator=self._generator)
            yield from cast("list[float]", block.tolist())  # pyright: ignore[reportUnknownMemberType]

    def many(self, count: int) -> Tensor:
        """The next ``count`` uniforms as a float64 tensor [count]."""
        return torch.tensor([next(self._uniforms) for _ in range(count)], dtype=torch.float64)
