"""From rows to figures: ratios of totals with intervals over prompts, tokens a pass, acceptance by position."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from specdiff.bench.compare import first_difference

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one setting did on some prompts.

    Attributes:
        prompts, new_tokens, rounds: counts.
        tau: tokens a target pass, the extra token included. mat: accepted tokens a round, without it.
        rate: (new tokens - 1) a second, over all prompts. speedup: ratio of the rates to the baseline's.
        low, high: bootstrap 95 % interval of the speed-up over prompts; None with fewer than two prompts.
        mean_of_ratios: mean over prompts of each one's own ratio.
        acceptance: [G] share of the drafts that reached position j in which all up to it was accepted.
        round_seconds, draft_seconds, search_seconds: of a round; search is what drafting takes beside the network's
            pass. same_text: prompts whose text is the baseline's.
    """

    prompts: int
    new_tokens: int
    rounds: int
    tau: float
    mat: float
    rate: float
    speedup: float
    low: float | None
    high: float | None
    mean_of_ratios: float
    acceptance: tuple[float, ...]
    round_seconds: float
    draft_seconds: float
    search_seconds: float
    same_text: int


def summarise(rows: Sequence[Row], baseline: Sequence[Row]) -> Figures:
    """Sum up a setting's rows beside the baseline's.

    Args:
        rows, baseline: of the same prompts in the same order, at least one.
    """
    assert rows, "at least one row"
    assert [r["prompt"] for r in rows] == [b["prompt"] for b in baseline], "the same prompts"
    pairs = list(zip(rows, baseline, strict=True))
    tokens, rounds = sum(len(r["tokens"]) for r in rows), sum(r["rounds"] for r in rows)
    passes, drafted = sum(r["passes"] for r in rows), sum(r["draft_seconds"] for r in rows)
    denoised = sum(r["denoise_seconds"] for r in rows)
    interval = _interval(pairs)
    return Figures(
        prompts=len(rows),
        new_tokens=tokens,
        rounds=rounds,
        tau=tokens / max(passes, 1),
        mat=sum(r["accepted"] for r in rows) / max(rounds, 1),
        rate=_rate(rows),
        speedup=_ratio(pairs),
        low=interval[0],
        high=interval[1],
        mean_of_ratios=sum(_ratio([pair]) for pair in pairs) / len(pairs),
        acceptance=_acceptance(rows),
        round_seconds=(drafted + sum(r["target_seconds"] + r["verify_seconds"] for r in rows)) / max(rounds, 1),
        draft_seconds=drafted / max(rounds, 1),
        search_seconds=max(0.0, drafted - denoised) / max(rounds, 1),
        same_text=sum(first_difference(r["tokens"], b["tokens"]) is None for r, b in pairs),
    )


def _rate(rows: Sequence[Row]) -> float:
    return sum(max(len(r["tokens"]) - 1, 1) for r in rows) / sum(r["seconds"] for r in rows)


def _ratio(pairs: Sequence[tuple[Row, Row]]) -> float:
    return _rate([r for r, _ in pairs]) / _rate([b for _, b in pairs])


def _interval(pairs: Sequence[tuple[Row, Row]], resamples: int = 2000) -> tuple[float | None, float | None]:
    if len(pairs) < 2:
        return None, None
    rng = random.Random(0)
    ratios = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return ratios[math.floor(0.025 * resamples)], ratios[math.floor(0.975 * resamples)]


def _acceptance(rows: Sequence[Row]) -> tuple[float, ...]:
    asked = [sum(column) for column in zip_longest(*(r["asked_by_position"] for r in rows), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(r["accepted_by_position"] for r in rows), fillvalue=0)]
    return tuple(a / n for a, n in zip(accepted, asked, strict=True))


def late(acceptance: Sequence[float]) -> float:
    """Mean acceptance over the later half of the positions; 0 where there are none."""
    later = acceptance[len(acceptance) // 2 :]
    return sum(later) / len(later) if later else 0.0
