"""How long a drafter's network takes, so that what else drafting costs (search, draws, trees) can be told apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, Observation
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.marginal import MarginalDrafter, MarginalSession, MarginalSource
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.windowed import WindowedDrafter
from specdiff.errors import InputError


class SourceWatch:
    """Seconds spent in a source's passes; stays 0 where a drafter has no such source.

    Attributes:
        seconds: so far. active: whether it watches anything.
    """

    def __init__(self) -> None:
        self.seconds, self.active = 0.0, False


class WatchedSource:
    """A `MarginalSource` whose passes are timed."""

    def __init__(self, inner: MarginalSource, watch: SourceWatch) -> None:
        self.inner, self._watch = inner, watch
        self.name, self.vocab_size, self.max_gamma = inner.name, inner.vocab_size, inner.max_gamma
        self.feature_layers, self.vocab = inner.feature_layers, inner.vocab

    def open(self, rows: int) -> MarginalSession:
        """Start a session for ``rows`` requests."""
        return _Session(self.inner.open(rows), self._watch)


class _Session:
    def __init__(self, inner: Any, watch: SourceWatch) -> None:
        self._inner, self._watch = inner, watch

    @property
    def passes(self) -> int:
        return self._inner.passes

    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        began = time.perf_counter()
        try:
            return self._inner.logits(requests)
        finally:
            self._watch.seconds += time.perf_counter() - began

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def rewind(self, row: int, length: int) -> None:
        self._inner.rewind(row, length)


def watch_source(drafter: Drafter | None) -> SourceWatch:
    """Time a one-step diffusion drafter's passes from here on; for other drafters the watch stays at 0."""
    watch = SourceWatch()
    inner = drafter.inner if isinstance(drafter, WindowedDrafter) else drafter
    if isinstance(inner, MarginalDrafter):
        inner.source, watch.active = WatchedSource(inner.source, watch), True
    return watch


def network_of(drafter: MarginalDrafter) -> MaskedSource | BlockCausalSource:
    """The source that denoises in steps, beneath a watch.

    Raises:
        InputError: it has none.
    """
    source = drafter.source.inner if isinstance(drafter.source, WatchedSource) else drafter.source
    if not isinstance(source, (MaskedSource, BlockCausalSource)):
        raise InputError.of(
            "steps", expected="a drafter that denoises", got=drafter.name, remedy="use one step with this drafter"
        )
    return source
