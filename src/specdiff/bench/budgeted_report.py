"""What a budgeted study found: accuracy with intervals, gains between methods, the paper's beside ours."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdiff.bench.intervals import percentiles
from specdiff.errors import InputError
from specdiff.files import write_atomically

PAPER_GAINS = {"plain": 0.63, "unaligned": 0.11}
"""SpecDiff-2, figure 6: Math-500 accuracy at a budget of 15 s over plain and unaligned decoding. The figure's single
points are not known to us."""
PAPER_NOTE = "SpecDiff-2, figure 6, Math-500 at 15 s"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method at one budget.

    Attributes:
        accuracy: share of prompts answered correctly; interval: its bootstrap 95 % interval over prompts.
        tokens: mean thought tokens in time. finished: share of thoughts that ended by themselves in time.
    """

    method: str
    budget: float
    accuracy: float
    interval: Interval
    tokens: float
    finished: float


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The last method against another at one budget, on the same prompts.

    Attributes:
        over: the other. difference: of the accuracies. relative: accuracy ratio - 1, None where the other has none
            right. difference_interval, relative_interval: bootstrap 95 % over prompts; the latter over the resamples in
            which the other has any right.
        paper: the published relative gain, None where none is known.
    """

    method: str
    over: str
    budget: float
    difference: float
    difference_interval: Interval
    relative: float | None
    relative_interval: Interval | None
    paper: float | None


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """Points and gains over the prompts that every method has finished."""

    prompts: int
    points: tuple[Point, ...]
    gains: tuple[Gain, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def summarise(rows: Sequence[Mapping[str, Any]], *, resamples: int = 2000, seed: int = 0) -> StudyReport:
    """Sum up a study's rows.

    Args:
        rows: of `specdiff.bench.budgeted.run_study`; methods are shown in the order in which they come there.
            The gains are those of the method ``"aligned"``, or of the last one where none has that name.

    Raises:
        InputError: no prompt has a row of every method.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_key = {(row["id"], row["method"]): row for row in rows}
    ids = [i for i in dict.fromkeys(row["id"] for row in rows) if all((i, m) in by_key for m in methods)]
    if not ids:
        raise InputError.of("study", expected="a prompt with every method's row", got=len(rows), remedy="run it on")
    budgets = [cut["budget"] for cut in by_key[ids[0], methods[0]]["cuts"]]
    rng = random.Random(seed)
    picks = [[rng.randrange(len(ids)) for _ in ids] for _ in range(resamples)]
    points: list[Point] = []
    samples: dict[tuple[str, float], list[float]] = {}
    accuracy: dict[tuple[str, float], float] = {}
    for method in methods:
        for at, budget in enumerate(budgets):
            cuts = [by_key[i, method]["cuts"][at] for i in ids]
            correct = [bool(cut["correct"]) for cut in cuts]
            key = method, budget
            samples[key] = [sum(correct[i] for i in pick) / len(ids) for pick in picks]
            accuracy[key] = sum(correct) / len(ids)
            points.append(
                Point(
                    method=method,
                    budget=budget,
                    accuracy=accuracy[key],
                    interval=percentiles(samples[key]),
                    tokens=sum(cut["tokens"] for cut in cuts) / len(ids),
                    finished=sum(bool(cut["finished"]) for cut in cuts) / len(ids),
                )
            )
    best = "aligned" if "aligned" in methods else methods[-1]
    gains = [_gain(best, other, budget, accuracy, samples) for other in methods if other != best for budget in budgets]
    return StudyReport(prompts=len(ids), points=tuple(points), gains=tuple(gains))


def _gain(
    best: str,
    other: str,
    budget: float,
    accuracy: Mapping[tuple[str, float], float],
    samples: Mapping[tuple[str, float], Sequence[float]],
) -> Gain:
    a, b = accuracy[best, budget], accuracy[other, budget]
    pairs = list(zip(samples[best, budget], samples[other, budget], strict=True))
    ratios = [x / y - 1 for x, y in pairs if y > 0]
    return Gain(
        method=best,
        over=other,
        budget=budget,
        difference=a - b,
        difference_interval=percentiles([x - y for x, y in pairs]),
        relative=a / b - 1 if b else None,
        relative_interval=percentiles(ratios) if b and ratios else None,
        paper=PAPER_GAINS.get(other) if best == "aligned" else None,
    )


def markdown(report: StudyReport) -> str:
    """Two tables: accuracy against budget, and gains beside the paper's."""
    budgets = list(dict.fromkeys(p.budget for p in report.points))
    lines = [
        f"Accuracy on {report.prompts} prompts, bootstrap 95 % intervals over prompts; mean tokens thought in time.",
        "",
        "| method | " + " | ".join(f"{b:g} s" for b in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    for method in dict.fromkeys(p.method for p in report.points):
        cells = [
            f"{100 * p.accuracy:.1f} % ({100 * p.interval[0]:.1f} to {100 * p.interval[1]:.1f}), "
            f"{p.tokens:.0f} tokens, {100 * p.finished:.0f} % finished"
            for p in report.points
            if p.method == method
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    if report.gains:
        lines += [
            "",
            "| gain | budget | points | relative | paper |",
            "|---|---|---|---|---|",
        ]
    for g in report.gains:
        low, high = g.difference_interval
        relative = "n/a"
        if g.relative is not None and g.relative_interval is not None:
            relative = f"{g.relative:+.0%} ({g.relative_interval[0]:+.0%} to {g.relative_interval[1]:+.0%})"
        paper = "n/a" if g.paper is None else f"{g.paper:+.0%}"
        lines.append(
            f"| {g.method} over {g.over} | {g.budget:g} s | {100 * g.difference:+.1f} ({100 * low:+.1f} to "
            f"{100 * high:+.1f}) | {relative} | {paper} |"
        )
    if any(g.paper is not None for g in report.gains):
        lines += ["", f"Paper: {PAPER_NOTE}; other model, task and machine than ours."]
    return "\n".join(lines) + "\n"


def plot(report: StudyReport, path: Path) -> None:
    """Accuracy against budget, and the relative gains with the paper's as lines, as a PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError.of(
            "png", expected="matplotlib", got="not installed", remedy="install specdiff[bench]"
        ) from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in dict.fromkeys(p.method for p in report.points):
        points = [p for p in report.points if p.method == method]
        low = [max(0.0, 100 * (p.accuracy - p.interval[0])) for p in points]
        high = [max(0.0, 100 * (p.interval[1] - p.accuracy)) for p in points]
        accuracies = [100 * p.accuracy for p in points]
        left.errorbar([p.budget for p in points], accuracies, yerr=[low, high], marker="o", capsize=3, label=method)
    left.set(xlabel="budget (s)", ylabel="accuracy (%)", xscale="log", ylim=(0, 100))
    budgets = list(dict.fromkeys(p.budget for p in report.points))
    left.set_xticks(budgets, [f"{b:g}" for b in budgets])
    left.minorticks_off()
    left.legend()
    for place, other in enumerate(dict.fromkeys(g.over for g in report.gains)):
        gains = [g for g in report.gains if g.over == other and g.relative is not None]
        color = f"C{place}"
        right.plot(
            [g.budget for g in gains],
            [100 * (g.relative or 0.0) for g in gains],
            marker="o",
            color=color,
            label=f"{report.gains[0].method} over {other}",
        )
        if report.gains[0].method == "aligned" and other in PAPER_GAINS:
            right.axhline(100 * PAPER_GAINS[other], color=color, ls="--", label=f"paper at 15 s, over {other}")
    right.set(xlabel="budget (s)", ylabel="relative gain in accuracy (%)", xscale="log", xlim=left.get_xlim())
    right.set_xticks(budgets, [f"{b:g}" for b in budgets])
    right.minorticks_off()
    if report.gains:
        right.legend()
    figure.suptitle(f"{report.prompts} prompts; 95 % bootstrap intervals")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
