"""The protocol between masked diffusion LMs and the drafters that use them.

The network sees the committed prefix and a window of tokens of which some are still [MASK]; for every token of the
window it returns the logits that predict that token, whatever the alignment of its own rows is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdiff.checking import integer
from specdiff.errors import InputError
from specdiff.models.diffusion.config import MaskedDenoiserConfig


@dataclass(frozen=True)
class Window:
    """One row's wish for a pass.

    Attributes:
        row: index within the batch that the session was opened for.
        prefix: [L] int64 CPU, the committed tokens, L >= 1.
        tokens: [G] int64 CPU, the window behind the prefix: the mask id where a token is still hidden. G >= 1.
    """

    row: int
    prefix: Tensor
    tokens: Tensor


class WindowSession(Protocol):
    """Prefix state of one batch."""

    @property
    def passes(self) -> int:
        """Forward passes so far; one pass serves all rows."""
        ...

    def logits(self, windows: Sequence[Window]) -> list[Tensor]:
        """ONE pass: logits [G, V] of each window; row i predicts token i of the window."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """Forget a row beyond its first ``length`` tokens; its next prefix may go on differently from there."""
        ...


class MaskedDenoiser(Protocol):
    """A masked diffusion LM.

    Attributes:
        config: its facts.
    """

    config: MaskedDenoiserConfig

    def open(self, rows: int, *, refresh: int | None = None) -> WindowSession:
        """Start a session for ``rows`` requests.

        Args:
            rows: batch size.
            refresh: for full attention: recompute the keys and values of the prefix every so many rounds and reuse
                them in between, which is approximate (drafts may get worse; the committed text cannot). None or 1 = no
                reuse. Must be None for block-causal attention, whose prefix cache is exact.

        Raises:
            InputError: ``refresh`` is below 1, or given for block-causal attention.
        """
        ...


def check_refresh(config: MaskedDenoiserConfig, refresh: int | None) -> None:
    """Refuse a refresh interval that means nothing for a denoiser; see `MaskedDenoiser.open`.

    Raises:
        InputError: it is below 1, or given for block-causal attention.
    """
    if refresh is None:
        return
    integer("refresh", refresh, 1, remedy="1 recomputes the prefix every round")
    if config.attention == "block":
        raise InputError.of(
            "refresh",
            expected="None for block-causal attention",
            got=refresh,
            remedy="leave it out: the prefix cache of this model is exact and needs no refresh",
        )
