"""The block-causal denoiser as a marginal source: an exact prefix cache, one pass a round.

Each pass feeds, on top of the cached prefix, the tokens committed since (causal; kept) and the window
[last committed token, MASK, ...] (bidirectional within itself; dropped afterwards).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, Observation
from specdiff.models.cached_decoder import CachedDecoder, NewRows
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.diffusion.base import Window
from specdiff.models.supported import usable_context
from specdiff.sampling import check_finite


class BlockCausalSource:
    """A `BlockCausalDenoiser` behind the `MarginalSource` protocol.

    Attributes:
        context: tokens the denoiser can hold, window included; see `specdiff.drafters.windowed`.
        mask_id: what stands for a hidden token in `BlockCausalSession.denoise`; no token has this id.
    """

    def __init__(self, denoiser: BlockCausalDenoiser, *, name: str | None = None) -> None:
        self.denoiser = denoiser.eval()
        config = denoiser.config
        self.name = name or config.name or "block-causal"
        self.vocab_size: int = config.vocab_size
        self.mask_id: int = config.vocab_size
        self.max_gamma: int | None = config.window
        self.feature_layers: tuple[int, ...] = tuple(config.feature_layers)
        self.vocab: Tensor | None = denoiser.draft_vocab.cpu()
        self.context = usable_context(denoiser.decoder)

    def open(self, rows: int) -> BlockCausalSession:
        """Start a session for ``rows`` requests."""
        return BlockCausalSession(self, rows)


class BlockCausalSession:
    """Prefix caches of one batch."""

    def __init__(self, source: BlockCausalSource, rows: int) -> None:
        self._denoiser, self._context, self._name = source.denoiser, source.context, source.name
        self._mask_id = source.mask_id
        self._decoder = CachedDecoder(source.denoiser.decoder, rows)
        self._features: list[list[Tensor]] = [[] for _ in range(rows)]
        self._rows = rows
        self.passes = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        """Collect the target's hidden states of committed positions, where the denoiser reads them."""
        for o in observations:
            if o.features is not None:
                self._features[o.row].append(o.features)

    def rewind(self, row: int, length: int) -> None:
        """Keep what is cached of the first ``length`` - 1 tokens: the last one opens the window."""
        cached, kept = self._decoder.cache.lengths[row], max(length - 1, 0)
        self._decoder.cache.truncate(row, min(cached, kept))
        if self._features[row]:  # states of the positions from ``cached`` on
            self._features[row] = [torch.cat(self._features[row])[: max(kept - cached, 0)]]

    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """One pass over fully masked windows; logits [gamma, W] of each request."""
        mask_id = self._mask_id
        return self.denoise(
            [Window(r.row, r.prefix, torch.full((r.budget.gamma,), mask_id, dtype=torch.int64)) for r in requests]
        )

    @torch.inference_mode()
    def denoise(self, windows: Sequence[Window]) -> list[Tensor]:
        """One pass over windows that may be filled in part; logits [G, W] of each.

        The window is fed whole, whatever G is: masks see each other, and training knows no shorter one. Its first row
        is the last committed token, so the token drafted last is never fed.
        """
        new = [NewRows.causal(torch.empty(0, dtype=torch.int64)) for _ in range(self._rows)]
        fresh, hidden_rows = [0] * self._rows, [torch.empty(0, dtype=torch.bool)] * self._rows
        for w in windows:
            length = self._decoder.cache.lengths[w.row]
            prefix, rows = w.prefix[length:], self._window(w)
            fresh[w.row] = n = prefix.numel() - 1
            filled = torch.full((rows,), self._mask_id, dtype=torch.int64)
            filled[1 : w.tokens.numel()] = w.tokens[: rows - 1][: w.tokens.numel() - 1]
            hidden_rows[w.row] = filled[1:] == self._mask_id
            tokens = torch.cat([prefix, filled[1:].masked_fill(hidden_rows[w.row], 0)])
            visible = torch.ones(n + rows, n + rows, dtype=torch.bool).tril()
            visible[n:, n:] = True
            new[w.row] = NewRows(tokens, torch.arange(n + rows), visible)
        size = max(x.tokens.numel() for x in new)
        device = self._denoiser.mask_embedding.device
        tokens = torch.zeros(self._rows, size, dtype=torch.int64)
        is_mask = torch.zeros(self._rows, size, dtype=torch.bool)
        for b, x in enumerate(new):
            tokens[b, : x.tokens.numel()] = x.tokens
            is_mask[b, fresh[b] + 1 : x.tokens.numel()] = hidden_rows[b]
        features = self._take_features(fresh, size)
        embeds = self._denoiser.embed(tokens.to(device), is_mask.to(device), features)
        hidden = self._decoder.run(new, inputs_embeds=embeds).last_hidden_state
        self._decoder.keep([range(n) for n in fresh])
        self.passes += 1
        picked = [hidden[w.row, fresh[w.row] : fresh[w.row] + w.tokens.numel()] for w in windows]
        logits = self._denoiser.head(torch.cat(picked))
        check_finite(logits, f"drafter {self._name!r}")
        return list(logits.split([w.tokens.numel() for w in windows]))

    def _window(self, window: Window) -> int:
        """Rows of the window: all that the denoiser was trained with, but at the end of its context only G."""
        full, context = self._denoiser.window, self._context
        fits = context is None or window.prefix.numel() - 1 + full <= context
        return full if fits else window.tokens.numel()

    def _take_features(self, fresh: list[int], size: int) -> Tensor | None:
        if not self._denoiser.config.feature_layers:
            return None
        like = self._denoiser.mask_embedding
        width = self._denoiser.config.hidden_size * len(self._denoiser.config.feature_layers)
        features = torch.zeros(self._rows, size, width, dtype=like.dtype, device=like.device)
        for row, n in enumerate(fresh):
            if n:
                states = torch.cat(self._features[row])
                features[row, :n] = states[:n].to(features)
                self._features[row] = [states[n:]]
        return features
