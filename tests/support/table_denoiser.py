"""A masked denoiser whose logits are a table over what its window shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.models.diffusion import MaskedDenoiserConfig, Window


class TableDenoiser:
    """Random logits for every prefix and every filling of the window.

    Args:
        vocab: number of ordinary tokens; the mask is the id behind them. scale: of the logits.
    """

    def __init__(self, vocab: int, *, seed: int = 0, scale: float = 2.0) -> None:
        self.config = MaskedDenoiserConfig(family="table", vocab_size=vocab + 1, mask_id=vocab, shift=False)
        self._seed, self._scale = seed, scale

    def open(self, rows: int, *, refresh: int | None = None) -> TableWindows:
        """Start a session."""
        return TableWindows(self)

    def logits(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """[G, V + 1] float64, the same for the same ids."""
        key = self._seed
        for token in (*prefix.tolist(), -1, *tokens.tolist()):
            key = (key * 1_000_003 + token + 2) % (1 << 61)
        generator = torch.Generator().manual_seed(key)
        shape = (tokens.numel(), self.config.vocab_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64) * self._scale


class TableWindows:
    """Counts passes and remembers the windows it saw."""

    def __init__(self, denoiser: TableDenoiser) -> None:
        self._denoiser = denoiser
        self.passes = 0
        self.seen: list[list[Window]] = []

    def logits(self, windows: Sequence[Window]) -> list[Tensor]:
        """Look up."""
        self.passes += 1
        self.seen.append([Window(w.row, w.prefix.clone(), w.tokens.clone()) for w in windows])
        return [self._denoiser.logits(w.prefix, w.tokens) for w in windows]

    def rewind(self, row: int, length: int) -> None:
        """Nothing is kept."""
