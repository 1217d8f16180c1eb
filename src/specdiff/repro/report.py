"""What a study writes: ``report.json`` with everything, ``table.md`` to read, ``figure.png`` where it has a figure.

Sentences on differences are written by a person, into ``notes.json`` beside the report
(``{"key of the line": "why"}``); the next call of the same command puts them into the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdiff.errors import InputError
from specdiff.files import write_text
from specdiff.repro.plots import Plot, draw
from specdiff.repro.summary import Figures

NOTES, REPORT, TABLE, FIGURE = "notes.json", "report.json", "table.md", "figure.png"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table: ours beside the published.

    Attributes:
        key: names it in ``notes.json``. label: what is read.
        ours: numbers by column. published: those of the paper, by the same columns; None where they are not known.
        figures: all that was measured, where the line is one setting's.
    """

    key: str
    label: str
    ours: Mapping[str, float | None]
    published: Mapping[str, float | None] = field(default_factory=dict)
    figures: Figures | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines under a title."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One table or figure of a paper, at this scale.

    Attributes:
        study: its name. source: what the published numbers belong to.
        tables, plot: what it shows. remarks: what a reader must know (scaled windows, our reading of a figure).
        measured: files of rows: header, runs, rows. training: models that it trained and how.
    """

    study: str
    source: str
    tables: tuple[Table, ...]
    measured: tuple[Mapping[str, Any], ...]
    plot: Plot | None = None
    remarks: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write the report's files, each whole or not at all.

    Returns:
        The files; without matplotlib no figure is among them.

    Raises:
        InputError: ``notes.json`` is not sentences by key, or names a line that there is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys = [line.key for table in report.tables for line in table.lines]
    assert len(set(keys)) == len(keys), "keys of lines differ"
    notes = read_notes(folder / NOTES, keys)
    drawn = report.plot is not None and draw(report.plot, folder / FIGURE)
    data = {
        "study": report.study,
        "source_of_published": report.source,
        "remarks": list(report.remarks),
        "tables": [_table_json(table, notes) for table in report.tables],
        "plot": None if report.plot is None else asdict(report.plot),
        "figure": FIGURE if drawn else None,
        "training": dict(report.training),
        "measured": list(report.measured),
    }
    write_text(folder / REPORT, json.dumps(data, indent=1, allow_nan=False) + "\n")
    write_text(folder / TABLE, markdown(report, notes))
    return [folder / REPORT, folder / TABLE, *([folder / FIGURE] if drawn else [])]


def read_notes(path: Path, keys: Sequence[str]) -> dict[str, str]:
    """Sentences on differences, by the lines' keys; none where there is no file.

    Raises:
        InputError: it is not an object of texts, or has another key.
    """
    if not path.is_file():
        return {}
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise ValueError("not an object of texts")
    except ValueError as error:
        raise InputError.of(
            str(path), expected='an object such as {"both": "why"}', got=str(error), remedy="fix the file"
        ) from error
    unknown = [key for key in notes if key not in keys]
    if unknown:
        raise InputError.of(str(path), expected="keys among " + ", ".join(keys), got=unknown, remedy="rename them")
    return notes


def markdown(report: Report, notes: Mapping[str, str]) -> str:
    """The tables as Markdown; ``n/a`` where a number is not known."""
    parts = [f"# {report.study}", f"Published: {report.source}."]
    parts += [f"* {remark}" for remark in report.remarks]
    for table in report.tables:
        ours = list(dict.fromkeys(c for line in table.lines for c in line.ours))
        theirs = [c for c in ours if any(c in line.published for line in table.lines)]
        head = ["", *ours, *(f"published {c}" for c in theirs), "difference"]
        body = [
            [
                line.label,
                *(_number(line.ours.get(c), c, line.figures) for c in ours),
                *(_number(line.published.get(c), c) for c in theirs),
                notes.get(line.key, ""),
            ]
            for line in table.lines
        ]
        rows = [head, ["---"] * len(head), *body]
        parts.append(f"## {table.title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts) + "\n"


def _number(value: float | None, column: str, figures: Figures | None = None) -> str:
    if value is None:
        return "n/a"
    text = f"{value:.1%}" if column.endswith("share") else f"{value:.2f}"
    if column == "speedup":
        text += "x"
        if figures is not None and figures.low is not None and figures.high is not None:
            text += f" ({figures.low:.2f} to {figures.high:.2f})"
    return text


def _table_json(table: Table, notes: Mapping[str, str]) -> dict[str, Any]:
    return {
        "title": table.title,
        "lines": [
            {
                "key": line.key,
                "label": line.label,
                "ours": dict(line.ours),
                "published": dict(line.published),
                "difference": notes.get(line.key, ""),
                "figures": None if line.figures is None else asdict(line.figures),
            }
            for line in table.lines
        ],
    }
