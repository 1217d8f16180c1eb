"""DiffuSpec (arXiv 2510.02358) here: the ablation, fixed against adaptive length, denoising steps, categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdiff.control.defaults import default_budget
from specdiff.repro import published
from specdiff.repro.grid import Pair
from specdiff.repro.plots import Plot
from specdiff.repro.report import Line, Report, Table
from specdiff.repro.settings import NEAR_ARGMAX, PLAIN, DrafterSpec, Setting
from specdiff.repro.study import Measured, Options, line_of, measure_grid
from specdiff.types import CausalPaths

PAPER = "diffuspec"
WINDOW = 30
"""The paper's largest draft length; a shorter drafter's window takes its place."""
FIXED = (10, 20, 30, 50, 100)
STEPS = tuple(range(1, 11))
_COLUMNS = ("speedup", "tau", "mat")
_ABLATION = {
    "neither": "neither", "cps": "CPS only", "adl": "ADL only", "both": "CPS and ADL (DiffuSpec)",
    "planner": "the planner (ours)",
}  # fmt: skip


def settings(
    drafter: str, window: int, *, ngram: str, fixed: Sequence[int], steps: Sequence[int], planner: bool
) -> list[Setting]:
    """The grid of the study; names are the lines' keys.

    Args:
        drafter: name. window: its longest draft. ngram: the 3-gram model of the search. fixed: draft lengths.
        steps: numbers of denoising steps. planner: whether it can draft best-first trees.
    """
    raw, search = DrafterSpec(name=drafter), DrafterSpec(name=drafter, ngram=ngram)
    grid = [Setting(name=PLAIN)]
    for key, shape, controller in (
        ("neither", None, "fixed"), ("cps", CausalPaths(), "fixed"),
        ("adl", None, "adl"), ("both", CausalPaths(), "adl"),
    ):  # fmt: skip
        # one candidate a position: the raw argmax draft, cut after its first EOS, as the search's is
        spec, shape = (raw, CausalPaths(beam=1, cap=1, weight=1.0)) if shape is None else (search, shape)
        grid.append(Setting(name=key, drafter=spec, gamma=min(WINDOW, window), shape=shape, controller=controller))
    if planner:
        grid.append(Setting(name="planner", drafter=raw, gamma=window, controller="planner"))
    grid += [Setting(name=f"fixed k={k}", drafter=search, gamma=k, shape=CausalPaths()) for k in fixed if k <= window]
    for count in steps:
        spec = DrafterSpec(name=drafter, steps=count)
        grid.append(
            Setting(name=f"steps={count}", drafter=spec, gamma=min(WINDOW, window), draft_temperature=NEAR_ARGMAX)
        )
    return grid


def scaled(lengths: Sequence[int], window: int) -> tuple[int, ...]:
    """Draft lengths for a window: those of the paper that fit, or the paper's in proportion where none would."""
    if window >= max(FIXED):
        return tuple(lengths)
    found = {max(1, round(window * k / max(FIXED))) for k in lengths} | {max(1, window // 2), window}
    return tuple(sorted(found))


def run(
    pair: Pair,
    drafter: str,
    options: Options,
    *,
    ngram: str = "prompt",
    fixed: Sequence[int] | None = None,
    steps: Sequence[int] = STEPS,
    label: str = PAPER,
    training: Mapping[str, Any] | None = None,
) -> Report:
    """Measure and sum up.

    Args:
        pair: the target. drafter: a one-step diffusion drafter. options: see there. ngram: as for `specdiff.load`.
        fixed: draft lengths; None = the paper's, scaled to the drafter's window. steps: denoising steps.
        label: name of the study. training: what is known of how the drafter was trained, for the report.

    Raises:
        InputError: the drafter cannot do what is asked, or the folder holds another measurement.
    """
    spec = DrafterSpec(name=drafter)
    window = pair.window(spec, WINDOW)
    lengths = scaled(FIXED, window) if fixed is None else tuple(fixed)
    grid = settings(drafter, window, ngram=ngram, fixed=lengths, steps=steps, planner=_plans(pair, spec))
    done = measure_grid(label, pair, grid, options)
    tables = (
        Table(title="Ablation", lines=tuple(_ablation(done))),
        Table(title="Fixed draft length against adaptive", lines=tuple(_fixed(done, lengths))),
        Table(title="Denoising steps", lines=tuple(_steps(done, steps))),
        Table(title="By category, CPS and ADL", lines=tuple(_categories(done))),
        Table(title="CPS in a round", lines=(_share(done),)),
    )
    return Report(
        study=label,
        source=published.source(PAPER),
        tables=tables,
        measured=(done.to_json(),),
        remarks=tuple(_remarks(window, lengths, ngram, training or {})),
        training=training or {},
        plot=Plot(
            kind="bars",
            title="DiffuSpec: speed-up over plain decoding",
            x_label="",
            y_label="speed-up",
            series={"here": [(line.label, line.ours["speedup"] or 0.0) for line in tables[0].lines]},
            published={
                "published": [(li.label, v) for li in tables[0].lines if (v := li.published.get("speedup")) is not None]
            },
        ),
    )


def _plans(pair: Pair, spec: DrafterSpec) -> bool:
    drafter = pair.drafter(spec)
    return drafter is not None and type(default_budget(drafter, greedy=True).shape).__name__ == "BestFirst"


def _ablation(done: Measured) -> list[Line]:
    names = [s.name for s in done.settings]
    return [
        line_of(key, label, done.figures(key), _known("ablation", key), _COLUMNS)
        for key, label in _ABLATION.items()
        if key in names
    ]


def _fixed(done: Measured, lengths: Sequence[int]) -> list[Line]:
    present = [k for k in lengths if any(s.name == f"fixed k={k}" for s in done.settings)]
    lines = [
        line_of(f"fixed k={k}", f"CPS, k = {k}", done.figures(f"fixed k={k}"), _known("fixed", str(k)), _COLUMNS)
        for k in present
    ]
    adaptive = line_of("adaptive", "CPS, adaptive", done.figures("both"), _known("ablation", "both"), _COLUMNS)
    unmeasured = [
        Line(key=f"published k={k}", label=f"CPS, k = {k} (the paper's)", ours=dict.fromkeys(_COLUMNS),
             published=_known("fixed", str(k)))
        for k in FIXED if k not in present
    ]  # fmt: skip
    return [*lines, adaptive, *unmeasured]


def _steps(done: Measured, steps: Sequence[int]) -> list[Line]:
    return [
        line_of(f"steps={n}", f"{n} step{'s' if n > 1 else ''}", done.figures(f"steps={n}"),
                _known("steps", str(n)), _COLUMNS)
        for n in steps
    ]  # fmt: skip


def _categories(done: Measured) -> list[Line]:
    return [
        line_of(f"category {group}", group, done.figures("both", keep=lambda p, g=group: p.group == g),
                _known("categories", group), _COLUMNS)
        for group in done.groups()
    ]  # fmt: skip


def _share(done: Measured) -> Line:
    both = done.figures("both")
    return Line(
        key="cps share",
        label="search, n-gram model and tree, of a round's time",
        ours={"share": both.search_seconds / both.round_seconds, "milliseconds": 1e3 * both.search_seconds},
        published={"share": published.value(PAPER, "cps_share", "both", "share")},
        figures=both,
    )


def _known(part: str, entry: str) -> dict[str, float | None]:
    return {name: published.value(PAPER, part, entry, name) for name in ("speedup", "mat")} | {"tau": None}


def _remarks(window: int, lengths: Sequence[int], ngram: str, training: Mapping[str, Any]) -> list[str]:
    remarks = [
        "tau counts the target's own token of each round, MAT (the paper's) does not.",
        f"The search's n-gram model is {ngram!r}; the paper's is a KenLM 3-gram.",
        "Steps above 1 draft a chain from left to right without the search.",
        "The averages of ADL start at the first observation.",
    ]
    if window < WINDOW:
        remarks.insert(
            0,
            f"The drafter's window is {window}, the paper drafts up to {WINDOW} (fixed: up to {max(FIXED)}): draft "
            f"lengths are scaled to the window, fixed k = {', '.join(map(str, lengths))}, and ADL's numbers with them.",
        )
    for name, facts in training.items():
        loss = facts["held_out_loss"]
        remarks.append(
            f"The drafter was {name}: masked loss on human text only, {loss['nll']} nats a token on kept-out texts."
        )
    return remarks
