"""Windows on top of a prefix: without a cache, with a refreshed one (full attention), or with an exact one (blocks).

* **Full attention.** Every token sees the masks behind it, so cached keys and values of the prefix are those of an
  older window: an approximation, renewed every ``refresh`` rounds. Without ``refresh`` each pass is a full one.
* **Block-causal.** A committed whole block never sees what comes after it: its keys and values are final, and each pass
  feeds only the unfinished block and the window. The window is filled up with masks to the end of its last block, since
  the model has never seen half a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff.models.cached_decoder import CachedDecoder, NewRows
from specdiff.models.diffusion.base import Window, check_refresh
from specdiff.models.diffusion.config import MaskedDenoiserConfig

if TYPE_CHECKING:
    from specdiff.models.diffusion.model import DiffusionLM


def shown(config: MaskedDenoiserConfig, window: Window) -> tuple[int, Tensor, Tensor]:
    """What the network is fed for a window.

    Returns:
        First token of the prefix that is shown, the prefix from there (ids beyond the table, of a target with a larger
        vocabulary, are shown as masks: unknown, but there), and the window, filled up to the end of its last block.
    """
    length, count = window.prefix.numel(), window.tokens.numel()
    assert length >= 1, "a window follows at least one token"
    assert config.max_window is None or 1 <= count <= config.max_window, "windows are limited by the context"
    filling = -(length + count) % config.block_size
    start = config.first_shown(length, count + filling)
    tail = torch.cat([window.tokens, window.tokens.new_full((filling,), config.mask_id)])
    prefix = window.prefix[start:]
    return start, prefix.masked_fill(prefix >= config.vocab_size, config.mask_id), tail


@dataclass
class _Row:
    """What is known of one row: where its shown prefix starts, its last length, its rounds since the last refresh."""

    start: int = 0
    length: int = 0
    rounds: int = 0


class PrefixWindows:
    """Implements `WindowSession` for a `DiffusionLM`.

    Args:
        model: the denoiser. rows: batch size. refresh: see `MaskedDenoiser.open`.

    Attributes:
        passes: forward passes so far.
    """

    def __init__(self, model: DiffusionLM, rows: int, *, refresh: int | None = None) -> None:
        blocks = model.config.attention == "block"
        check_refresh(model.config, refresh)
        self._model, self._rows, self._refresh = model, rows, refresh
        self._state = [_Row() for _ in range(rows)]
        cached = blocks or (refresh is not None and refresh > 1)
        self._decoder = CachedDecoder(model.decoder, rows) if cached else None
        self.passes = 0

    @torch.inference_mode()
    def logits(self, windows: Sequence[Window]) -> list[Tensor]:
        """ONE pass: logits [G, V] of each window; row i predicts token i of the window."""
        self.passes += 1
        if self._decoder is not None:
            return self._on_cache(self._decoder, windows)
        views = [shown(self._model.config, w) for w in windows]
        spans = [(p.numel(), p.numel() + w.tokens.numel()) for (_, p, _), w in zip(views, windows, strict=True)]
        return self._model.rows([torch.cat([prefix, tail]) for _, prefix, tail in views], spans)

    def rewind(self, row: int, length: int) -> None:
        """Keep what is cached of the first ``length`` tokens; the next window opens a new round in any case."""
        if length == 0 or self._decoder is None:
            self._state[row] = _Row()
        state = self._state[row]
        state.length = 0
        if self._decoder is not None:
            kept = max(length - state.start, 0) // self._model.config.block_size * self._model.config.block_size
            self._decoder.cache.truncate(row, min(kept, self._decoder.cache.lengths[row]))

    def _on_cache(self, decoder: CachedDecoder, windows: Sequence[Window]) -> list[Tensor]:
        shift = int(self._model.config.shift)
        new = [NewRows.causal(torch.empty(0, dtype=torch.int64)) for _ in range(self._rows)]
        keep: list[range] = [range(0)] * self._rows
        spans: list[tuple[int, int, int]] = []
        for window in windows:
            start, prefix, tail = shown(self._model.config, window)
            final = self._final(prefix.numel())
            length = self._reusable(decoder, window, start, final)
            tokens = torch.cat([prefix[length:], tail])
            new[window.row] = NewRows(tokens, torch.arange(len(tokens)), self._model.visible(length, len(tokens)))
            keep[window.row] = range(final - length)
            first = prefix.numel() - length - shift
            spans.append((window.row, first, first + window.tokens.numel()))
        hidden = decoder.run(new).last_hidden_state  # sequence b is entry b: none is ever released
        decoder.keep(keep)
        picked = [hidden[row, start:stop] for row, start, stop in spans]
        return list(self._model.head(torch.cat(picked)).split([p.shape[0] for p in picked]))

    def _final(self, length: int) -> int:
        """How many tokens of a prefix stay in the cache: whole blocks, less the row that a shifted window reads."""
        return (length - int(self._model.config.shift)) // self._model.config.block_size * self._model.config.block_size

    def _reusable(self, decoder: CachedDecoder, window: Window, start: int, final: int) -> int:
        """Cached slots this pass may build on; drops the row's cache where it was cropped or is due for a refresh."""
        row, length = self._state[window.row], window.prefix.numel()
        due = False
        if length != row.length:  # a new round; further denoising steps of a round come with the same prefix
            due = self._refresh is not None and row.rounds % self._refresh == 0
            row.rounds += 1
        usable = 0 if due or start != row.start else min(decoder.cache.lengths[window.row], final)
        decoder.cache.truncate(window.row, usable)
        row.start, row.length = start, length
        return usable
