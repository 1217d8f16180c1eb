"""Seconds of whole rounds, measured in turns: every size and setting once, then all again.

Sizes measured one after the other would charge a machine that slows down for the sizes that came last. Here each cycle
times a round of everything, plain steps included, in rotating order; a cycle that was slow as a whole is scaled to the
median cycle; and medians over cycles are made never to fall with the number of nodes. Rounds are the decode loop's own,
so they pay all that a round pays: laws, verification, compaction of the caches, records.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdiff.control.costs import CostTable, never_falling
from specdiff.control.defaults import default_budget
from specdiff.decode import DecodeLoop, Request
from specdiff.decoder import SpeculativeDecoder
from specdiff.drafters.base import Drafter
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import BestFirst, Budget, Draft, Round

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured at a temperature.

    Attributes:
        table: for the planner. seconds: of a whole round, [C] for each setting. spread: distance of the quartiles of
            the plain steps' times over their median, the largest over contexts; a quiet machine stays below 0.1.
    """

    table: CostTable
    seconds: dict[Budget, tuple[float, ...]]
    spread: float


@dataclass
class _Told:
    """A controller that asks for what it is told to."""

    wish: Budget | None = None

    def budget(self, room: int) -> Budget | None:
        return None if self.wish is None or room < 1 else replace(self.wish, gamma=min(self.wish.gamma, room))

    def observe(self, record: Round, draft: Draft) -> None:
        pass


class _Loop:
    """One text that never ends; a new one is begun where the context is full."""

    def __init__(
        self, decoder: SpeculativeDecoder, drafter: Drafter | None, prompt: Tensor, temperature: float, clock: Clock
    ) -> None:
        self._decoder, self._drafter, self._prompt, self._clock = decoder, drafter, prompt, clock
        self._sampling, self._told = SamplingOptions(temperature=temperature), _Told()
        self._begin()

    def _begin(self) -> None:
        request = Request(
            prompt=self._prompt, sampling=self._sampling, stop=StopOptions(max_new_tokens=1 << 20, ignore_eos=True)
        )
        self._told.wish = None
        self._loop = DecodeLoop(
            self._decoder.target,
            self._drafter,
            [request],
            budget=default_budget(self._drafter, greedy=self._sampling.greedy),
            controller=lambda budget: self._told,
            clock=self._clock,
        )
        self._rounds = self._loop.run()
        next(self._rounds)  # the prompt's passes and an untimed step

    def time(self, wish: Budget | None) -> tuple[float, float, int]:
        """Seconds of a round, of its draft, and where it began."""
        if self._loop.rows[0].finish is not None:
            self._begin()
        self._told.wish = wish
        began = self._clock()
        next(self._rounds)
        ended, record = self._clock(), self._loop.rows[0].rounds[-1]
        return ended - began, record.draft_seconds, record.start


_Key = tuple[float, Budget | int | None]
"""(temperature, a setting, a size of best-first tree, or None = a plain step without a drafter)."""


def measure_costs(
    decoder: SpeculativeDecoder,
    drafter: Drafter,
    text: Tensor,
    settings: dict[float, Sequence[Budget]],
    *,
    nodes: Sequence[int],
    contexts: Sequence[int],
    clock: Clock,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[float, Costs]:
    """Time rounds after prefixes of some lengths.

    Args:
        text: ids to make prefixes of, repeated as often as needed.
        settings: whole settings to time, by temperature. nodes: sizes of best-first trees, 0 first.
        contexts: lengths of the prefixes, as far as the models' contexts go; the table has those at mid-measurement.
        clock: seconds; on an accelerator it must wait for the device. repeats: cycles, after one that warms up.
    """
    room = repeats * sum(len(nodes) + len(s) for s in settings.values())
    limit = (decoder.target.context or 1 << 30) - room
    lengths = [c for c in contexts if c <= limit] or [max(1, (decoder.target.context or 2) // 2)]
    keys: list[_Key] = [(t, n) for t in settings for n in nodes]
    keys += [(t, budget) for t, budgets in settings.items() for budget in budgets]
    keys += [(t, None) for t in settings]
    whole: dict[_Key, list[float]] = {key: [] for key in keys}  # a value a context
    draft: dict[float, list[float]] = {t: [] for t in settings}
    spread, grown = dict.fromkeys(settings, 0.0), list[float]()
    for length in lengths:
        progress(f"rounds after {length} tokens")
        prompt = text.repeat(-(-length // text.numel()))[:length]
        cycles = _cycles(decoder, drafter, prompt, keys, clock, repeats)
        totals = [sum(seconds for seconds, _, _ in cycle.values()) for cycle in cycles]
        scale = [statistics.median(totals) / total if total else 1.0 for total in totals]
        for key in keys:
            whole[key].append(statistics.median(c[key][0] * f for c, f in zip(cycles, scale, strict=True)))
        for t in settings:
            drafted = [k for k in keys if k[0] == t and k[1] not in (None, 0)]
            times = [c[k][1] * f for c, f in zip(cycles, scale, strict=True) for k in drafted]
            draft[t].append(statistics.median(times) if times else 0.0)
            plain = [c[t, None][0] for c in cycles]
            low, _, high = statistics.quantiles(plain, n=4) if len(plain) > 1 else (0.0, 0.0, 0.0)
            spread[t] = max(spread[t], (high - low) / statistics.median(plain))
        grown.append(statistics.mean(start - length for c in cycles for _, _, start in c.values()))
    shift = round(statistics.mean(grown))
    measured: dict[float, Costs] = {}
    for t, budgets in settings.items():
        rows = [[whole[t, n][at] - (draft[t][at] if n else 0.0) for n in nodes] for at in range(len(lengths))]
        smallest = [1e-3 * whole[t, 0][at] for at in range(len(lengths))]  # a draft may be timed above its round
        table = CostTable(
            contexts=tuple(length + shift for length in lengths),
            nodes=tuple(nodes),
            target=tuple(tuple(never_falling([max(v, low) for v in r])) for r, low in zip(rows, smallest, strict=True)),
            draft=tuple(draft[t]),
            plain=tuple(whole[t, None]),
        )
        measured[t] = Costs(
            table=table, seconds={budget: tuple(whole[t, budget]) for budget in budgets}, spread=spread[t]
        )
    return measured


def _cycles(
    decoder: SpeculativeDecoder, drafter: Drafter, prompt: Tensor, keys: Sequence[_Key], clock: Clock, repeats: int
) -> list[dict[_Key, tuple[float, float, int]]]:
    with torch.inference_mode():
        drafting = {t: _Loop(decoder, drafter, prompt, t, clock) for t, _ in keys}
        plain = {t: _Loop(decoder, None, prompt, t, clock) for t, _ in keys}
        cycles: list[dict[_Key, tuple[float, float, int]]] = []
        for repeat in range(repeats + 1):
            first = repeat * len(keys) // (repeats + 1)
            cycle: dict[_Key, tuple[float, float, int]] = {}
            for t, what in (*keys[first:], *keys[:first]):
                if isinstance(what, int):
                    window = default_budget(drafter, greedy=t == 0).gamma
                    wish = Budget(gamma=window, shape=BestFirst(what)) if what else None
                else:
                    wish = what
                cycle[t, what] = (plain if what is None else drafting)[t].time(wish)
            if repeat:
                cycles.append(cycle)
    return cycles
