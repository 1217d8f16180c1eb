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
from specdiff.models.supported import usable_context
from specdiff.sampling import check_finite


class BlockCausalSource:
    """A `BlockCausalDenoiser` behind the `MarginalSource` protocol.

    Attributes:
        context: tokens the denoiser can hold, window included; see `specdiff.drafters.windowed`.
    """

    def __init__(self, denoiser: BlockCausalDenoiser, *, name: str | None = None) -> None:
        self.denoiser = denoiser.eval()
        config = denoiser.config
        self.name = name or config.name or "block-causal"
        self.vocab_size: int = config.vocab_size
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

    @torch.inference_mode()
    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """One pass for all rows; logits [gamma, W] of each.

        The window is fed whole, whatever gamma is: masks see each other, and training knows no shorter one.
        """
        new = [NewRows.causal(torch.empty(0, dtype=torch.int64)) for _ in range(self._rows)]
        fresh = [0] * self._rows
        for r in requests:
            length = self._decoder.cache.lengths[r.row]
            prefix, window = r.prefix[length:], self._window(r)
            fresh[r.row] = n = prefix.numel() - 1
            tokens = torch.cat([prefix, prefix.new_zeros(window - 1)])
            visible = torch.ones(n + window, n + window, dtype=torch.bool).tril()
            visible[n:, n:] = True
            new[r.row] = NewRows(tokens, torch.arange(n + window), visible)
        size = max(x.tokens.numel() for x in new)
        device = self._denoiser.mask_embedding.device
        tokens = torch.zeros(self._rows, size, dtype=torch.int64)
        is_mask = torch.zeros(self._rows, size, dtype=torch.bool)
        for b, x in enumerate(new):
            tokens[b, : x.tokens.numel()] = x.tokens
            is_mask[b, fresh[b] + 1 : x.tokens.numel()] = True
        features = self._take_features(fresh, size)
        embeds = self._denoiser.embed(tokens.to(device), is_mask.to(device), features)
        hidden = self._decoder.run(new, inputs_embeds=embeds).last_hidden_state
        self._decoder.keep([range(n) for n in fresh])
        self.passes += 1
        picked = [hidden[r.row, fresh[r.row] : fresh[r.row] + r.budget.gamma] for r in requests]
        logits = self._denoiser.head(torch.cat(picked))
        check_finite(logits, f"drafter {self._name!r}")
        return list(logits.split([r.budget.gamma for r in requests]))

    def _window(self, request: DraftRequest) -> int:
        """Rows of the window: all that the denoiser was trained with, but at the end of its context only gamma."""
        full, context = self._denoiser.window, self._context
        fits = context is None or request.prefix.numel() - 1 + full <= context
        return full if fits else request.budget.gamma

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
