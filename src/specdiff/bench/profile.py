"""Where a round's time goes: the target's forward pass, the drafter's, and everything else.

The models' own calls are timed where they are made, so "rest" is all that specdiff adds: masks, cache bookkeeping,
laws, drafting from marginals, verification, records.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdiff.decoder import Generation, SpeculativeDecoder
from specdiff.drafters import marginal
from specdiff.errors import InputError
from specdiff.records import Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

Part = tuple[object, str]
"""Something that is called in a pass: an object and the name of its method, e.g. ``(model, "forward")``."""

_SEARCH: Part = (marginal, "causal_paths")


@dataclass
class _Watch:
    """Seconds spent in the watched parts, and calls of the first of them."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time of all decode rounds, prefill included in neither figure.

    Attributes:
        rounds: decode rounds. total, target, drafter: seconds. search: seconds of path search, part of neither.
        target_calls, drafter_calls: forward passes.
        totals: what the records say.
    """

    rounds: int
    total: float
    target: float
    drafter: float
    search: float
    target_calls: int
    drafter_calls: int
    totals: Totals

    @property
    def rest(self) -> float:
        """Share of a round that is neither the target's nor the drafter's forward pass, in [0, 1]."""
        return (self.total - self.target - self.drafter) / self.total


@contextmanager
def _watched(parts: Sequence[Part]) -> Iterator[_Watch]:
    watch = _Watch()

    def timed(call: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                watch.seconds += time.perf_counter() - began
                watch.calls += counts

        return wrapper

    own = [vars(owner).get(name) for owner, name in parts]  # None: the class has it, an object's own hides it
    for index, (owner, name) in enumerate(parts):
        setattr(owner, name, timed(getattr(owner, name), index == 0))
    try:
        yield watch
    finally:
        for (owner, name), value in zip(parts, own, strict=True):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def profile(
    decoder: SpeculativeDecoder,
    target_parts: Sequence[Part],
    drafter_parts: Sequence[Part],
    prompts: Sequence[Tensor],
    *,
    sampling: SamplingOptions,
    stop: StopOptions,
) -> Profile:
    """Decode prompts one by one and split the time of their rounds.

    Args:
        target_parts, drafter_parts: what their passes call; calls of the first part of each are counted as passes.

    Raises:
        InputError: no prompts.
    """
    if not prompts:
        raise InputError.of("prompts", expected="at least one", got=0, remedy="give a prompt")
    total = target = drafter = search = 0.0
    calls = [0, 0]
    generations: list[Generation] = []
    warm = decoder.generate(prompts[0], sampling=sampling, stop=StopOptions(max_new_tokens=8))
    assert isinstance(warm, Generation)
    for prompt in prompts:
        with _watched(target_parts) as t, _watched(drafter_parts) as d, _watched([_SEARCH]) as s:
            pieces = decoder.stream(prompt, sampling=sampling, stop=stop)
            next(pieces)  # prefill of both models, and the first round
            began, before = time.perf_counter(), (t.seconds, d.seconds, t.calls, d.calls, s.seconds)
            last = None
            for piece in pieces:
                last = piece.generation or last
            total += time.perf_counter() - began
            target += t.seconds - before[0]
            drafter += d.seconds - before[1]
            calls[0] += t.calls - before[2]
            calls[1] += d.calls - before[3]
            search += s.seconds - before[4]
        if last is not None:
            generations.append(last)
    rounds = [r for g in generations for r in g.rounds[1:]]
    return Profile(
        rounds=len(rounds),
        total=total,
        target=target,
        drafter=drafter,
        search=search,
        target_calls=calls[0],
        drafter_calls=calls[1],
        totals=Totals.of(rounds),
    )
