"""SpecDiff-2 (arXiv 2511.00606): its decoding methods as settings, and the studies that need no training.

Tables 2 to 4 (unaligned against aligned), figures 5 (K x draft temperature), 8 and 9 (denoising steps), 10 (gamma) and
11 (gamma x denoising steps). The points of figures 8, 9 and 11 are not known to us; what they show here is our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from specdiff.repro import published
from specdiff.repro.grid import Pair
from specdiff.repro.plots import Plot
from specdiff.repro.report import Line, Report, Table
from specdiff.repro.settings import NEAR_ARGMAX, PLAIN, DrafterSpec, Setting
from specdiff.repro.study import Measured, Options, line_of, measure_grid, published_lines, ratio_line
from specdiff.repro.summary import Figures
from specdiff.types import Chain, Samples

PAPER = "specdiff2"
K = 8
KS = (1, 2, 4, 8)
DRAFT_TEMPERATURES = (0.1, 0.5, 1.0, 1.5, 2.0)
STEPS = (1, 2, 4, 8)
GAMMAS = (4, 8, 16, 32, 64)
COLUMNS = ("speedup", "tau", "mat")


def chain(name: str, drafter: DrafterSpec, gamma: int, temperature: float, draft_temperature: float = 1.0) -> Setting:
    """One draft: the argmax chain and match at temperature 0, SpecDiff's sample and ratio rule above."""
    greedy = temperature == 0
    return Setting(
        name=name, drafter=drafter, gamma=gamma, shape=Chain(), rule="match" if greedy else "ratio",
        draft_temperature=NEAR_ARGMAX if greedy else draft_temperature, temperature=temperature,
    )  # fmt: skip


def selected(
    name: str, drafter: DrafterSpec, gamma: int, temperature: float, *, k: int = K, draft_temperature: float = 1.0
) -> Setting:
    """K drafts: SpecDiff-2's self-selection; at temperature 0 the one that agrees longest (match over their trie)."""
    return Setting(
        name=name, drafter=drafter, gamma=gamma, shape=Samples(k), draft_temperature=draft_temperature,
        rule="match" if temperature == 0 else "self_selection", temperature=temperature,
    )  # fmt: skip


def plain(temperature: float, name: str = PLAIN) -> Setting:
    """The same loop without a drafter."""
    return Setting(name=name, temperature=temperature)


def tables(
    number: int,
    pairs: Mapping[str, tuple[Pair, DrafterSpec, DrafterSpec]],
    options: Options,
    *,
    temperatures: Sequence[float],
    k: int = K,
    draft_temperature: float = 1.0,
) -> Report:
    """Tables 2, 3 and 4: targets x temperatures x data sets, unaligned against aligned.

    Args:
        number: 2 and 4 show speed-up and tau, 3 what alignment brings. pairs: by the target's name, the target, the
            unaligned and the aligned drafter. options: see there. temperatures: of the targets.
        k, draft_temperature: of SpecDiff-2's drafts.
    """
    lines: list[Line] = []
    measured: list[Measured] = []
    for place, (target, (pair, unaligned, aligned)) in enumerate(pairs.items()):
        grid: list[Setting] = []
        for t in temperatures:
            grid += [
                plain(t, f"plain, T={t:g}"),
                chain(f"unaligned, T={t:g}", unaligned, pair.window(unaligned, 32), t),
                selected(f"aligned, T={t:g}", aligned, pair.window(aligned, 32), t, k=k,
                         draft_temperature=draft_temperature),
            ]  # fmt: skip
        done = measure_grid(f"specdiff2 table {number}", pair, grid, options, rows=f"rows-{place}.jsonl")
        measured.append(done)
        for t in temperatures:
            for group in (*done.groups(), "all"):
                lines += _table_lines(number, target, done, t, group)
    return Report(
        study=f"specdiff2-table{number}",
        source=published.source(PAPER),
        tables=(
            Table(title=f"Table {number}", lines=(*lines, *published_lines(PAPER, f"table{number}", COLUMNS[:2]))),
        ),
        measured=tuple(m.to_json() for m in measured),
        remarks=(
            "unaligned: one draft, ratio rule (match at T = 0). aligned: K drafts, self-selection "
            f"(match over their trie at T = 0), K = {k}, draft temperature {draft_temperature:g}.",
            "all: ratio of totals over all prompts; the paper's mean is over data sets.",
            "The published cells are of other models and sets of prompts; they stand on lines of their own.",
        ),
    )


def _table_lines(number: int, target: str, done: Measured, temperature: float, group: str) -> list[Line]:
    def keep(prompt: object) -> bool:
        return group == "all" or getattr(prompt, "group", None) == group

    where, baseline = f"{target}, T={temperature:g}, {group}", f"plain, T={temperature:g}"
    lines = [
        line_of(f"{where}, {name}", f"{where}, {name}", done.figures(f"{name}, T={temperature:g}", baseline, keep),
                {}, COLUMNS)
        for name in ("unaligned", "aligned")
    ]  # fmt: skip
    if number == 3:
        gained = _over(lines[1].figures, lines[0].figures)
        lines.append(
            Line(key=f"{where}, gain", label=f"{where}, aligned over unaligned", ours={"speedup": gained, "tau": None})
        )
    return lines


def _over(left: Figures | None, right: Figures | None) -> float:
    assert left is not None
    assert right is not None
    return left.rate / right.rate


def figure5(
    pair: Pair, drafter: DrafterSpec, options: Options, *, temperature: float, ks: Sequence[int] = KS,
    draft_temperatures: Sequence[float] = DRAFT_TEMPERATURES, gamma: int | None = None,
) -> Report:  # fmt: skip
    """Figure 5: K drafts x draft temperature; K = 1 is self-selection with one draft."""
    window = gamma or pair.window(drafter, 32)
    grid = [plain(temperature)]
    grid += [
        selected(f"K={k}, draft T={d:g}", drafter, window, temperature, k=k, draft_temperature=d)
        for d in draft_temperatures
        for k in ks
    ]
    done = measure_grid("specdiff2 figure 5", pair, grid, options)
    lines = [line_of(s.name, s.name, done.figures(s.name), {}, COLUMNS) for s in grid[1:]]
    for d in draft_temperatures:
        most, least = (done.figures(f"K={k}, draft T={d:g}") for k in (max(ks), min(ks)))
        known = published.value(PAPER, "figure5", "K=8 over K=1", "ratio")
        lines.append(
            ratio_line(f"ratio, draft T={d:g}", f"K = {max(ks)} over K = {min(ks)}, draft T = {d:g}",
                       most.rate / least.rate, known if d == 2.0 and (min(ks), max(ks)) == (1, 8) else None)
        )  # fmt: skip
    return _curves(
        5, done, lines, "K", "tokens a second",
        {f"draft T = {d:g}": [(k, done.figures(f"K={k}, draft T={d:g}").rate) for k in ks] for d in draft_temperatures},
        remarks=(f"gamma {window}, T = {temperature:g}",),
    )  # fmt: skip


def denoising(
    number: int, pair: Pair, drafter: DrafterSpec, options: Options, *, temperature: float,
    steps: Sequence[int] = STEPS, gamma: int | None = None,
) -> Report:  # fmt: skip
    """Figures 8 (throughput) and 9 (drafting time and acceptance) against denoising steps."""
    window = gamma or pair.window(drafter, 32)
    grid = [plain(temperature), *(_stepped(f"steps={n}", drafter, n, window, temperature) for n in steps)]
    done = measure_grid(f"specdiff2 figure {number}", pair, grid, options)
    lines = []
    for n in steps:
        line = line_of(f"steps={n}", f"{n} steps", done.figures(f"steps={n}"), {}, COLUMNS)
        assert line.figures is not None
        lines.append(replace(line, ours={**line.ours, "draft ms": 1e3 * line.figures.draft_seconds}))
    curve: Callable[[Figures], float] = (lambda f: f.rate) if number == 8 else (lambda f: f.tau)
    series = {"here": [(n, curve(done.figures(f"steps={n}"))) for n in steps]}
    if number == 9:
        base = done.figures(f"steps={steps[0]}").draft_seconds
        series = {
            "tau": series["here"],
            f"drafting time, {steps[0]} step{'s' if steps[0] > 1 else ''} = 1": [
                (n, done.figures(f"steps={n}").draft_seconds / base) for n in steps
            ],
        }
    return _curves(
        number, done, lines, "denoising steps", "tokens a second" if number == 8 else "tau and relative time", series,
        remarks=(f"gamma {window}, T = {temperature:g}, a chain from left to right", _UNKNOWN),
    )  # fmt: skip


def figure10(
    pair: Pair, drafter: DrafterSpec, options: Options, *, temperature: float, gammas: Sequence[int] | None = None,
    k: int = K, draft_temperature: float = 1.0,
) -> Report:  # fmt: skip
    """Figure 10: the draft window."""
    window = pair.window(drafter, max(GAMMAS))
    chosen = fitting(GAMMAS, window) if gammas is None else tuple(gammas)
    grid = [plain(temperature)]
    grid += [selected(f"gamma={g}", drafter, g, temperature, k=k, draft_temperature=draft_temperature) for g in chosen]
    done = measure_grid("specdiff2 figure 10", pair, grid, options)
    lines = [line_of(s.name, s.name, done.figures(s.name), {}, COLUMNS) for s in grid[1:]]
    best = max(chosen, key=lambda g: done.figures(f"gamma={g}").rate)
    for name, label in (("diffucoder", "DiffuCoder"), ("diffullama", "DiffuLLaMA")):
        value = published.value(PAPER, "figure10", "best", name)
        lines.append(
            Line(key=f"best, {name}", label=f"best gamma (published: {label})", ours={"gamma": float(best)},
                 published={"gamma": value})
        )  # fmt: skip
    return _curves(
        10, done, lines, "gamma", "tokens a second",
        {"here": [(g, done.figures(f"gamma={g}").rate) for g in chosen]},
        remarks=(f"K = {k}, T = {temperature:g}; the drafter's window is {window}",),
    )  # fmt: skip


def figure11(
    pair: Pair, drafter: DrafterSpec, options: Options, *, temperature: float, gammas: Sequence[int] | None = None,
    steps: Sequence[int] = STEPS,
) -> Report:  # fmt: skip
    """Figure 11: gamma and denoising steps jointly."""
    chosen = fitting(GAMMAS, pair.window(drafter, max(GAMMAS))) if gammas is None else tuple(gammas)
    cells = [(g, n) for n in steps for g in chosen if n <= g]
    grid = [plain(temperature)]
    grid += [_stepped(f"gamma={g}, steps={n}", drafter, n, g, temperature) for g, n in cells]
    done = measure_grid("specdiff2 figure 11", pair, grid, options)
    lines = [line_of(s.name, s.name, done.figures(s.name), {}, COLUMNS) for s in grid[1:]]
    series = {
        f"{n} step{'s' if n > 1 else ''}": [
            (g, done.figures(f"gamma={g}, steps={n}").rate) for g in chosen if (g, n) in cells
        ]
        for n in steps
    }
    return _curves(
        11, done, lines, "gamma", "tokens a second", series,
        remarks=(f"T = {temperature:g}, a chain from left to right", _UNKNOWN),
    )  # fmt: skip


def fitting(gammas: Sequence[int], window: int) -> tuple[int, ...]:
    """The paper's draft lengths that fit a window, or halves of it where fewer than three do."""
    found = tuple(g for g in gammas if g <= window)
    return found if len(found) >= 3 else tuple(sorted({max(1, window // d) for d in (8, 4, 2, 1)}))


def _stepped(name: str, drafter: DrafterSpec, steps: int, gamma: int, temperature: float) -> Setting:
    return chain(name, replace(drafter, steps=steps), gamma, temperature)


def _curves(
    number: int, done: Measured, lines: Sequence[Line], x: str, y: str,
    series: Mapping[str, Sequence[tuple[float | str, float]]], *, remarks: Sequence[str] = (),
) -> Report:  # fmt: skip
    return Report(
        study=f"specdiff2-figure{number}",
        source=published.source(PAPER),
        tables=(Table(title=f"Figure {number}", lines=tuple(lines)),),
        measured=(done.to_json(),),
        remarks=tuple(remarks),
        plot=Plot(kind="lines", title=f"SpecDiff-2, figure {number}, here", x_label=x, y_label=y, series=series),
    )


_UNKNOWN = "The paper's points are not known to us: what is drawn is our reading of the figure, without numbers beside."

FIGURES = MappingProxyType({
    5: "K drafts x draft temperature", 8: "throughput against denoising steps",
    9: "drafting time and acceptance against denoising steps", 10: "gamma", 11: "gamma x denoising steps",
})  # fmt: skip
"""The figures that need no training, by number."""
