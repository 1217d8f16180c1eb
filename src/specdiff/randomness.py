"""Randomness as an argument.

Rules and draft builders are programs over two primitives, ``coin`` and ``draw``. In production a `RandomStream`
answers them from one seeded generator a request and purpose; given uniforms answer them through `Uniforms`; the exact
tests answer them by enumerating every outcome with its probability, so what they prove is the production code itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
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
    # right: first index whose cumulative weight EXCEEDS the threshold, skipping zero-weight tokens.
    if weights.device.type == "cpu":  # numpy's search: a tenth of what the call of a torch kernel costs
        ends = _cumulative(weights)
        index = int(ends.searchsorted(float(ends[-1]) * uniform, "right"))
    else:  # the sums stay where they are
        cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
        index = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    if index >= weights.numel():  # uniform * sum rounded up to the sum: the last token that has weight
        index = int(torch.nonzero(weights > 0)[-1])
    return index


def _cumulative(weights: Tensor) -> npt.NDArray[np.float64]:
    """Cumulative sums along the last axis; in numpy, where one number costs a tenth of what it does in torch."""
    return torch.cumsum(weights, dim=-1, dtype=torch.float64).numpy(force=True)


class Cdf:
    """Weights whose cumulative sum is computed once, for many draws from one row, with or without replacement.

    Args:
        weights: [W] non-negative weights with a positive, finite sum, on any device; need not be normalised.
    """

    # Below this share of the total, the mass left after taking indices out is recomputed instead of subtracted.
    _CANCELLATION = 1e-6

    def __init__(self, weights: Tensor, ends: npt.NDArray[np.float64] | None = None) -> None:
        self.weights = weights
        self._ends = _cumulative(weights) if ends is None else ends
        self._total = float(self._ends[-1])

    @classmethod
    def of_rows(cls, rows: Tensor) -> list[Cdf]:
        """One for each row of weights [M, W]; one kernel and one transfer for all of them."""
        return [cls(row, ends) for row, ends in zip(rows, _cumulative(rows), strict=True)]

    def index(self, uniform: float, without: Sequence[int] = ()) -> int:
        """Inverse CDF at ``uniform`` in [0, 1) of the weights with those at ``without`` set to zero."""
        if not without:
            return self._first_above(self._total * uniform)
        taken = sorted(without)
        spans = [(float(self._ends[i - 1]) if i else 0.0, float(self._ends[i])) for i in taken]
        mass = self._total - sum(end - start for start, end in spans)
        if mass < self._CANCELLATION * self._total:
            return inverse_cdf(self.masked(taken), uniform)
        threshold = mass * uniform
        for start, end in spans:  # step over every taken interval that lies below the threshold
            if threshold >= start:
                threshold = max(threshold + (end - start), end)
        return self._first_above(threshold, taken)

    def _first_above(self, threshold: float, taken: Sequence[int] = ()) -> int:
        index = int(self._ends.searchsorted(threshold, "right"))
        if index >= len(self._ends):  # rounded up to the total: the last index that has weight
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

    def __init__(self, seed: int, purpose: str, request: int = 0) -> None:
        digest = hashlib.blake2b(f"{seed}/{request}/{purpose}".encode(), digest_size=8).digest()
        super().__init__(_Endless(int.from_bytes(digest, "big") >> 1))

    def many(self, count: int) -> Tensor:
        """The next ``count`` uniforms as a float64 tensor [count]."""
        return torch.tensor([next(self._uniforms) for _ in range(count)], dtype=torch.float64)


class _Endless:
    """The uniforms of one seed, drawn a block at a time; apart from the stream, which would else refer to itself."""

    _BLOCK = 64

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def __iter__(self) -> Iterator[float]:
        while True:
            block = torch.rand(self._BLOCK, dtype=torch.float64, generator=self._generator)
            yield from cast("list[float]", block.tolist())  # pyright: ignore[reportUnknownMemberType]
