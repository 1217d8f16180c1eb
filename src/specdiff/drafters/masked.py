"""A masked diffusion LM as a one-step drafter (SpecDiff-2, DiffuSpec): prefix + [MASK] * gamma in, gamma marginals out.

The pass is that of the denoiser's session (`specdiff.models.diffusion.windows`): full, on a refreshed prefix cache, or
on an exact block cache. Here the logits become columns that a draft may use: never the mask itself, nothing beyond the
target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, Observation
from specdiff.errors import InputError
from specdiff.models.diffusion.base import MaskedDenoiser, Window, check_refresh
from specdiff.sampling import check_finite

WINDOW = 32
"""Default largest window: the best gamma that SpecDiff-2 reports for DiffuCoder (16 for DiffuLLaMA)."""


class MaskedSource:
    """A `MaskedDenoiser` behind the `MarginalSource` protocol.

    Args:
        denoiser: a masked diffusion LM that shares its token ids with the target.
        vocab_size: columns from there on are left out: the target's V, or less where further ids are padding. None =
            the denoiser's.
        window: largest gamma.
        refresh: rounds between two computations of the prefix's keys and values; see `MaskedDenoiser.open`.
        never: further ids that are never proposed (padding tokens, say); the mask always is among them.
        name: used in records.

    Attributes:
        denoiser, refresh: as given. vocab: [W] target ids of the columns. mask_id: of a hidden token.

    Raises:
        InputError: an option is out of range, or no id is left to propose.
    """

    def __init__(
        self,
        denoiser: MaskedDenoiser,
        *,
        vocab_size: int | None = None,
        window: int = WINDOW,
        refresh: int | None = None,
        never: Sequence[int] = (),
        name: str | None = None,
    ) -> None:
        config = denoiser.config
        check_refresh(config, refresh)
        limit = config.vocab_size if vocab_size is None else vocab_size
        for option, value in (("vocab_size", limit), ("window", window)):
            if value < 1:
                raise InputError.of(option, expected="an integer >= 1", got=value, remedy="leave it out")
        size = min(limit, config.vocab_size)
        taken = {config.mask_id, *never}
        if min(taken) < 0:
            raise InputError.of("never", expected="ids >= 0", got=tuple(never), remedy="give token ids")
        columns = torch.tensor([i for i in range(size) if i not in taken], dtype=torch.int64)
        if len(columns) == 0:
            raise InputError.of(
                "never", expected="at least one id that may be proposed", got=tuple(never), remedy="ban fewer ids"
            )
        self.denoiser, self.refresh, self.mask_id = denoiser, refresh, config.mask_id
        self.name = name or config.name or config.family
        self.vocab_size: int = size
        self.max_gamma: int | None = window if config.max_window is None else min(window, config.max_window)
        self.feature_layers: tuple[int, ...] = ()
        self.vocab: Tensor | None = columns
        self._columns = columns

    def open(self, rows: int) -> MaskedSession:
        """Start a session for ``rows`` requests."""
        return MaskedSession(self, rows)

    def select(self, logits: Tensor) -> Tensor:
        """The columns that may be proposed.

        Args:
            logits: [G, V] of the denoiser.

        Returns:
            [G, W] logits.

        Raises:
            NumericsError: one of them is NaN or infinite.
        """
        if self._columns.device != logits.device:
            self._columns = self._columns.to(logits.device)
        kept = logits.index_select(-1, self._columns)
        check_finite(kept, f"drafter {self.name!r}")
        return kept


class MaskedSession:
    """One batch on a `MaskedSource`."""

    def __init__(self, source: MaskedSource, rows: int) -> None:
        self._source = source
        self._windows = source.denoiser.open(rows, refresh=source.refresh)

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._windows.passes

    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """ONE pass over fully masked windows: logits [gamma, W] of each request."""
        mask_id = self._source.denoiser.config.mask_id
        return self.denoise(
            [Window(r.row, r.prefix, torch.full((r.budget.gamma,), mask_id, dtype=torch.int64)) for r in requests]
        )

    def denoise(self, windows: Sequence[Window]) -> list[Tensor]:
        """ONE pass over windows that may be filled in part: logits [G, W] of each."""
        return [self._source.select(rows) for rows in self._windows.logits(windows)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: prefixes come with the requests."""

    def rewind(self, row: int, length: int) -> None:
        """Forget a row beyond its first ``length`` tokens."""
        self._windows.rewind(row, length)
