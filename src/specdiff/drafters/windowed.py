"""A drafter whose context is shorter than the target's goes on from the last tokens instead of failing.

The inner drafter is shown a suffix of the text, its window. The window's start stays where it is while the text grows,
so that the inner prefix cache goes on; only when the context is full does it jump, to leave room for many rounds.
Drafts are verified as any other: the text stays exact, only acceptance may suffer from what the drafter does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Observation
from specdiff.errors import InputError
from specdiff.types import Budget, Draft, Provenance


def fit_context(drafter: Drafter, context: int | None, *, target_context: int | None) -> Drafter:
    """Return ``drafter`` as it is where its context holds all that the target's does, else windowed.

    Args:
        drafter: any drafter.
        context: tokens it can hold, None for any.
        target_context: tokens the target can hold, None for any.
    """
    if context is None or (target_context is not None and target_context <= context):
        return drafter
    return WindowedDrafter(drafter, context=context)


class WindowedDrafter:
    """Shows an inner drafter at most ``context`` tokens, its draft included.

    Args:
        inner: the drafter with the short context.
        context: tokens it can hold.
        keep: tokens of the text in a new window, at most; by default three quarters of the context, so that a window
            serves until the last quarter is full.
    """

    def __init__(self, inner: Drafter, *, context: int, keep: int | None = None) -> None:
        if context < 2:
            raise InputError.of("context", expected="at least 2 tokens", got=context, remedy="use another drafter")
        self.inner, self.context = inner, context
        self.keep = context * 3 // 4 if keep is None else keep
        if not 1 <= self.keep < context:
            raise InputError.of("keep", expected=f"1..{context - 1}", got=keep, remedy="leave room for drafts")
        self.name, self.vocab_size, self.feature_layers = inner.name, inner.vocab_size, inner.feature_layers
        self.longest = context - 1  # drafts; one token of text stays in the window at least
        self.max_gamma: int | None = None if inner.max_gamma is None else min(self.longest, inner.max_gamma)

    def provenance(self, budget: Budget) -> Provenance:
        """That of the inner drafter."""
        return self.inner.provenance(budget)

    def open(self, rows: int) -> WindowedSession:
        """Start a session for ``rows`` requests."""
        return WindowedSession(self, self.inner.open(rows), rows)


@dataclass
class _Window:
    """Where one row's window starts, and the newest target features (of the positions before ``features_end``)."""

    start: int = 0
    features: Tensor | None = None
    features_end: int = 0


class WindowedSession:
    """Windows of one batch over an inner session."""

    def __init__(self, drafter: WindowedDrafter, inner: DraftSession, rows: int) -> None:
        self._drafter, self._inner = drafter, inner
        self._windows = [_Window() for _ in range(rows)]

    @property
    def passes(self) -> int:
        """Forward passes of the inner drafter so far."""
        return self._inner.passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Move the windows that are full, then ask the inner drafter, for no more than its context holds."""
        longest = self._drafter.longest
        requests = [replace(r, budget=replace(r.budget, gamma=min(r.budget.gamma, longest))) for r in requests]
        restarted = [o for r in requests if (o := self._restart(r)) is not None]
        if restarted:
            self._inner.observe(restarted)
        return self._inner.propose([replace(r, prefix=r.prefix[self._windows[r.row].start :]) for r in requests])

    def observe(self, observations: Sequence[Observation]) -> None:
        """Hand on what lies in the windows; a prompt that does not fit opens its window at its end."""
        self._inner.observe([self._inside(o) for o in observations])

    def rewind(self, row: int, length: int) -> None:
        """Rewind the inner drafter; where the window starts later than that, the next round opens another one."""
        window = self._windows[row]
        if length > window.start:
            self._inner.rewind(row, length - window.start)
        else:
            self._inner.rewind(row, 0)
            window.start = 0
        known = max(length - 1, 0)  # features reach up to the last token but one
        if window.features is not None and known < window.features_end:
            window.features = window.features[: max(len(window.features) - (window.features_end - known), 0)]
            window.features_end = known

    def _inside(self, o: Observation) -> Observation:
        window = self._windows[o.row]
        if o.start == 0:
            self._windows[o.row] = window = _Window()
            length = len(o.tokens) + 1
            window.start = 0 if length < self._drafter.context else length - self._drafter.keep
        self._remember(window, o)
        if o.start > 0:
            return replace(o, start=o.start - window.start)
        features = None if o.features is None else o.features[window.start :]
        return replace(o, tokens=o.tokens[window.start :], features=features)

    def _remember(self, window: _Window, o: Observation) -> None:
        if o.features is None:
            return
        both = o.features if window.features is None else torch.cat([window.features, o.features])
        window.features = both[-self._drafter.context :]
        window.features_end += len(o.features)

    def _restart(self, request: DraftRequest) -> Observation | None:
        """Open another window for a row whose context is full; the prompt that the inner drafter then begins with."""
        window, length, gamma = self._windows[request.row], request.prefix.numel(), request.budget.gamma
        context = self._drafter.context
        if length - window.start + gamma <= context:
            return None
        window.start = length - min(self._drafter.keep, context - gamma)
        self._inner.rewind(request.row, 0)
        tokens = request.prefix[window.start : -1]
        features = None
        if window.features is not None:
            first = window.features_end - len(window.features)
            features = window.features[window.start - first : length - 1 - first]
        return Observation(row=request.row, start=0, tokens=tuple(tokens.tolist()), accepted=0, features=features)
