"""What a run leaves behind: one record a round, and totals that can be recounted from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specdiff.types import Draft, Extra, Round, Verdict


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """What the ``on_round`` hook receives: the draft (with its q rows), the verdict, the record."""

    row: int
    draft: Draft
    verdict: Verdict
    record: Round


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over rounds.

    Attributes:
        rounds: rounds = decode passes of the target for this request. tokens: committed. accepted, recovered, bonus:
            tokens by kind. tau: tokens / target passes; accepted_per_round: the same without the extra token.
        acceptance_by_position: [G] share of the rounds that proposed position j in which it was accepted.
        drafter_passes, target_passes, draft_seconds, target_seconds, verify_seconds: sums.
        rules, sources: rounds by rule and by drafter; of an ensemble, by the member whose path was accepted (the first
            one of equals), and under the ensemble's own name where nothing was.
    """

    rounds: int
    tokens: int
    accepted: int
    recovered: int
    bonus: int
    proposed: int
    tau: float
    accepted_per_round: float
    acceptance_by_position: tuple[float, ...]
    drafter_passes: int
    target_passes: int
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    rules: dict[str, int]
    sources: dict[str, int]

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Totals:
        """Sum up rounds (of one request, or of many)."""
        count = len(rounds)
        tokens, accepted = sum(r.committed for r in rounds), sum(r.accepted for r in rounds)
        passes = sum(r.target_passes for r in rounds)
        deepest = max((r.proposed for r in rounds), default=0)
        by_position = []
        for j in range(1, deepest + 1):
            asked = sum(r.proposed >= j for r in rounds)
            by_position.append(sum(r.accepted >= j for r in rounds) / asked)
        return cls(
            rounds=count,
            tokens=tokens,
            accepted=accepted,
            recovered=sum(r.extra is Extra.RECOVERED for r in rounds),
            bonus=sum(r.extra is Extra.BONUS for r in rounds),
            proposed=sum(r.proposed for r in rounds),
            tau=tokens / passes if passes else 0.0,
            accepted_per_round=accepted / count if count else 0.0,
            acceptance_by_position=tuple(by_position),
            drafter_passes=sum(r.drafter_passes for r in rounds),
            target_passes=passes,
            draft_seconds=sum(r.draft_seconds for r in rounds),
            target_seconds=sum(r.target_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            rules=dict(Counter(r.rule for r in rounds)),
            sources=dict(Counter(r.source for r in rounds if r.source)),
        )
