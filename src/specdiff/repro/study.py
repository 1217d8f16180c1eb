"""What all studies share: options, one measured grid over one pair, and lines of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff.checking import integer
from specdiff.repro import published as papers
from specdiff.repro.about import machine_facts, run_facts
from specdiff.repro.grid import Pair, run_grid
from specdiff.repro.progress import Progress, silent
from specdiff.repro.prompts import TaskPrompt
from specdiff.repro.report import Line
from specdiff.repro.rows import RowFile
from specdiff.repro.settings import PLAIN, Setting
from specdiff.repro.summary import Figures, Row, summarise


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every study is told.

    Attributes:
        out: folder of its files. prompts: to measure on. tokens: most new ones of each. seed: of everything drawn.
        progress: told how far it is.
    """

    out: Path
    prompts: tuple[TaskPrompt, ...]
    tokens: int = 128
    seed: int = 0
    progress: Progress = silent

    def __post_init__(self) -> None:
        integer("--tokens", self.tokens, 2, remedy="a rate needs at least two tokens")
        integer("--seed", self.seed, 0, remedy="give an integer >= 0")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rows of a grid, complete.

    Attributes:
        file: of the rows. prompts: in order. settings: in order.
    """

    file: RowFile
    prompts: tuple[TaskPrompt, ...]
    settings: tuple[Setting, ...]

    def rows(self, setting: str, keep: Callable[[TaskPrompt], bool] = lambda _: True) -> list[Row]:
        """A setting's rows, in the prompts' order."""
        return [self.file.rows[p.id, setting] for p in self.prompts if keep(p)]

    def figures(
        self, setting: str, baseline: str = PLAIN, keep: Callable[[TaskPrompt], bool] = lambda _: True
    ) -> Figures:
        """A setting beside a baseline."""
        return summarise(self.rows(setting, keep), self.rows(baseline, keep))

    def groups(self) -> list[str]:
        """The prompts' groups, in order."""
        return list(dict.fromkeys(p.group for p in self.prompts))

    def to_json(self) -> dict[str, Any]:
        """Header, runs and all rows."""
        return {"header": self.file.header, "runs": self.file.runs, "rows": list(self.file.rows.values())}


def measure_grid(
    study: str, pair: Pair, settings: Sequence[Setting], options: Options, *, rows: str = "rows.jsonl"
) -> Measured:
    """Measure, or finish measuring, settings x prompts.

    Args:
        study: names it in the header. pair: target and drafters. settings: with the baseline among them.
        rows: name of the file of rows.

    Raises:
        InputError: the folder holds another measurement, or a setting does not fit its drafter.
    """
    header = {
        "study": study,
        "target": pair.facts(),
        "drafters": {s.drafter.label: s.drafter.weights() for s in settings if s.drafter is not None},
        "settings": {s.name: s.to_json() for s in settings},
        "prompts": [p.id for p in options.prompts],
        "tokens": options.tokens,
        "seed": options.seed,
        "machine": machine_facts(),
    }
    file = RowFile(options.out / rows, header, run_facts())
    prompts = pair.encode(options.prompts)
    decodings = pair.decodings(settings, [ids for _, ids in prompts])
    run_grid(file, decodings, prompts, tokens=options.tokens, seed=options.seed, progress=options.progress)
    return Measured(file=file, prompts=options.prompts, settings=tuple(settings))


def line_of(
    key: str, label: str, figures: Figures, published: Mapping[str, float | None], columns: Sequence[str]
) -> Line:
    """A line of a setting's figures.

    Args:
        columns: attributes of `Figures`, which are the names of the published numbers too.
    """
    return Line(
        key=key,
        label=label,
        ours={c: getattr(figures, c) for c in columns},
        published={c: published.get(c) for c in columns if c in ("speedup", "mat", "tau")},
        figures=figures,
    )


def published_lines(paper: str, part: str, columns: Sequence[str]) -> list[Line]:
    """What the paper's table or figure is known to hold, where no line of ours stands beside it."""
    return [
        Line(key=f"published {entry}", label=f"{entry} (the paper's)", ours=dict.fromkeys(columns), published=known)
        for entry, known in papers.entries(paper, part).items()
    ]


def ratio_line(key: str, label: str, ours: float, published: float | None) -> Line:
    """A line of one ratio."""
    return Line(key=key, label=label, ours={"ratio": ours}, published={"ratio": published})
