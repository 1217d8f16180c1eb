"""The studies of SpecDiff-2 that train what they compare: figures 2, 7 and 12, robustness to the corpus, combined gain.

All drafters of a study start from one unaligned drafter (masked loss on human text only) and see the same batches in
the same order for the same number of steps. A model that is finished is used again, by every study of the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdiff.errors import InputError
from specdiff.repro import published
from specdiff.repro.grid import Pair
from specdiff.repro.plots import Plot
from specdiff.repro.report import Line, Report, Table
from specdiff.repro.settings import DrafterSpec, Setting
from specdiff.repro.specdiff2 import COLUMNS, PAPER, K, chain, plain, selected
from specdiff.repro.study import Measured, Options, line_of, measure_grid, ratio_line
from specdiff.repro.summary import late
from specdiff.repro.training import Trained, Workshop

DIVERGENCES = ("tv", "forward_kl", "reverse_kl", "jsd")
Corpora = Sequence[tuple[Path, float]]


@dataclass(frozen=True, kw_only=True)
class Material:
    """What is trained on.

    Attributes:
        workshop: makes the drafters. human: row file of human text. corpora: of the target's answers, with weights.
    """

    workshop: Workshop
    human: Path
    corpora: Corpora

    def unaligned(self) -> Trained:
        """The start of all."""
        return self.workshop.unaligned(self.human)

    def streak(
        self, start: Trained, steps: int | None = None, corpora: Corpora | None = None, tag: str = ""
    ) -> Trained:
        """Streak distillation for a number of steps; None = the scale's."""
        return self.aligned("streak", "streak", start, steps=steps, corpora=corpora, tag=tag)

    def aligned(
        self, name: str, objective: str, start: Trained, *, parameters: Mapping[str, object] | None = None,
        steps: int | None = None, corpora: Corpora | None = None, tag: str = "",
    ) -> Trained:  # fmt: skip
        """A drafter of one objective; its folder is named after objective, steps and tag."""
        count = self.workshop.scale.steps if steps is None else steps
        return self.workshop.aligned(
            f"{name}{tag}-{count}", objective, self.corpora if corpora is None else corpora, start,
            parameters=parameters, steps=count,
        )  # fmt: skip


def figure2(pair: Pair, material: Material, options: Options, *, temperature: float) -> Report:
    """Figure 2: acceptance by position of the unaligned drafter, AR-distillation and streak distillation."""
    start = material.unaligned()
    trained = {
        "unaligned": start,
        "AR-distillation": material.aligned("ar_distillation", "ar_distillation", start),
        "streak": material.streak(start),
    }
    done = _measured("specdiff2 figure 2", pair, trained, options, temperature)
    lines = [line_of(name, name, done.figures(name), {}, COLUMNS) for name in trained]
    later = {name: late(done.figures(name).acceptance) for name in trained}
    lines += [
        Line(key=f"late, {name}", label=f"acceptance over the later half of the window, {name}", ours={"share": value})
        for name, value in later.items()
    ]
    lines.append(
        Line(
            key="streak over AR", label="streak over AR-distillation, later half",
            ours={"ratio": later["streak"] / later["AR-distillation"] if later["AR-distillation"] else None},
            published={"ratio": published.value(PAPER, "figure2", "late", "streak_over_ar")},
        )
    )  # fmt: skip
    series = {name: [(j, share) for j, share in enumerate(done.figures(name).acceptance, start=1)] for name in trained}
    plot = Plot(
        kind="lines", title="SpecDiff-2, figure 2, here", x_label="position in the draft",
        y_label="share of drafts accepted up to here", series=series,
    )  # fmt: skip
    return _report("figure2", "Figure 2", done, lines, trained, plot, temperature)


def figure7(pair: Pair, material: Material, options: Options, *, temperature: float, points: Sequence[int]) -> Report:
    """Figure 7: throughput against steps of streak distillation, each point a run of its own with its whole schedule.

    Args:
        points: numbers of steps, rising; 0, the unaligned drafter, stands before them.
    """
    if not points or list(points) != sorted(set(points)) or points[0] < 1:
        raise InputError.of("--points", expected="rising numbers of steps, from 1 on", got=tuple(points),
                            remedy="such as 250,500,1000")  # fmt: skip
    start = material.unaligned()
    trained = {"0 steps": start, **{f"{n} steps": material.streak(start, n) for n in points}}
    done = _measured("specdiff2 figure 7", pair, trained, options, temperature)
    lines = [line_of(name, name, done.figures(name), {}, COLUMNS) for name in trained]
    first, last = done.figures("0 steps").rate, done.figures(f"{points[-1]} steps").rate
    lines.append(
        ratio_line("gain", f"throughput, {points[-1]} steps over 0 (the paper: 60,000)", last / first,
                   published.value(PAPER, "figure7", "60000 steps over 0", "ratio"))
    )  # fmt: skip
    series = {"here": [(n, done.figures(f"{n} steps").rate) for n in (0, *points)]}
    plot = Plot(
        kind="lines", title="SpecDiff-2, figure 7, here", x_label="steps of streak distillation",
        y_label="tokens a second", series=series,
    )  # fmt: skip
    return _report("figure7", "Figure 7", done, lines, trained, plot, temperature)


def figure12(
    pair: Pair, material: Material, options: Options, *, temperature: float, divergences: Sequence[str] = DIVERGENCES
) -> Report:
    """Figure 12: streak distillation against DistillSpec, the mean over positions of a divergence, at equal steps."""
    start = material.unaligned()
    trained = {"unaligned": start, "streak": material.streak(start)}
    for name in divergences:
        trained[f"DistillSpec, {name}"] = material.aligned(
            f"distill_spec_{name}", "distill_spec", start, parameters={"divergence": name}
        )
    done = _measured("specdiff2 figure 12", pair, trained, options, temperature)
    lines = [line_of(name, name, done.figures(name), {}, COLUMNS) for name in trained]
    known, streak = published.value(PAPER, "figure12", "DistillSpec over streak", "ratio"), done.figures("streak").rate
    lines += [
        ratio_line(f"{name} over streak", f"throughput, DistillSpec {name} over streak",
                   done.figures(f"DistillSpec, {name}").rate / streak, known)
        for name in divergences
    ]  # fmt: skip
    plot = Plot(
        kind="bars", title="SpecDiff-2, figure 12, here", x_label="", y_label="tokens a second",
        series={"here": [(name, done.figures(name).rate) for name in trained]},
    )  # fmt: skip
    return _report("figure12", "Figure 12", done, lines, trained, plot, temperature)


def corpus_study(pair: Pair, material: Material, options: Options, *, temperature: float) -> Report:
    """Robustness to the corpus (B.7): streak distillation on each corpus alone, and on all; measured on each task."""
    if len(material.corpora) < 2:
        raise InputError.of("--corpus", expected="at least two corpora, of one task each", got=len(material.corpora),
                            remedy="repeat --corpus")  # fmt: skip
    names = [path.name for path, _ in material.corpora]
    if len(set(names)) != len(names):
        raise InputError.of("--corpus", expected="folders of different names", got=names, remedy="rename one")
    start = material.unaligned()
    trained = {"unaligned": start}
    for path, weight in material.corpora:
        trained[f"on {path.name}"] = material.streak(start, corpora=[(path, weight)], tag=f"-on-{path.name}")
    trained["on all"] = material.streak(start)
    done = _measured("specdiff2 corpus", pair, trained, options, temperature)
    lines = [
        line_of(f"{name}, {group}", f"{name}, measured on {group}",
                done.figures(name, keep=lambda p, g=group: p.group == g), {}, COLUMNS)
        for group in done.groups() for name in trained
    ]  # fmt: skip
    plot = Plot(
        kind="bars", title="SpecDiff-2, B.7, here: the corpus", x_label="measured on", y_label="tau",
        series={
            name: [(group, done.figures(name, keep=lambda p, g=group: p.group == g).tau) for group in done.groups()]
            for name in trained
        },
    )  # fmt: skip
    return _report("corpus", "Trained on one task, measured on the others", done, lines, trained, plot, temperature)


def gain_study(
    pair: Pair, material: Material, options: Options, *, temperature: float, k: int = K, draft_temperature: float = 1.0
) -> Report:
    """What streak distillation and self-selection bring, alone and together, over unaligned SpecDiff."""
    start = material.unaligned()
    trained = {"unaligned": start, "streak": material.streak(start)}
    unaligned, streak = (_spec(trained[name], name) for name in trained)
    window = pair.window(unaligned, 32)
    grid: list[Setting] = [
        plain(temperature),
        chain("unaligned", unaligned, window, temperature),
        chain("streak", streak, window, temperature),
        selected("self-selection", unaligned, window, temperature, k=k, draft_temperature=draft_temperature),
        selected("both", streak, window, temperature, k=k, draft_temperature=draft_temperature),
    ]
    done = measure_grid("specdiff2 gain", pair, grid, options)
    lines = [line_of(s.name, s.name, done.figures(s.name), {}, COLUMNS) for s in grid[1:]]
    for name in ("streak", "self-selection", "both"):
        ratio = done.figures(name).rate / done.figures("unaligned").rate
        known = published.value(PAPER, "gain", f"{name} over unaligned", "ratio")
        lines.append(ratio_line(f"{name} over unaligned", f"throughput, {name} over unaligned", ratio, known))
    plot = Plot(
        kind="bars", title="SpecDiff-2, here: combined gain", x_label="", y_label="speed-up over plain decoding",
        series={"here": [(s.name, done.figures(s.name).speedup) for s in grid[1:]]},
    )  # fmt: skip
    return _report(
        "gain", "Combined gain", done, lines, trained, plot, temperature,
        f"K = {k}, draft temperature {draft_temperature:g}. The paper gives 40 to 50 % for both; 1.45 is its middle.",
    )  # fmt: skip


def _spec(trained: Trained, label: str) -> DrafterSpec:
    return DrafterSpec(name=str(trained.folder), label=label)


def _measured(study: str, pair: Pair, trained: Mapping[str, Trained], options: Options, temperature: float) -> Measured:
    """One draft of each model, so that the models differ and nothing else."""
    grid = [plain(temperature)]
    for name, model in trained.items():
        spec = _spec(model, name)
        grid.append(chain(name, spec, pair.window(spec, 32), temperature))
    return measure_grid(study, pair, grid, options)


def _report(
    name: str, title: str, done: Measured, lines: Sequence[Line], trained: Mapping[str, Trained], plot: Plot,
    temperature: float, *remarks: str,
) -> Report:  # fmt: skip
    return Report(
        study=f"specdiff2-{name}",
        source=published.source(PAPER),
        tables=(Table(title=title, lines=tuple(lines)),),
        measured=(done.to_json(),),
        plot=plot,
        training={label: dict(model.facts) for label, model in trained.items()},
        remarks=(
            f"T = {temperature:g}. All start from the unaligned drafter, see the same batches and take equal steps.",
            "The unaligned drafter's draft vocabulary comes from human text, the others' from the target's answers.",
            *remarks,
        ),
    )
