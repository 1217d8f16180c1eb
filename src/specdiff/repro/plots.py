"""Figures: curves or bars, ours filled and the published ones dashed; needs matplotlib (extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from specdiff.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What is drawn.

    Attributes:
        kind: ``"lines"`` or ``"bars"``. title, x_label, y_label: texts.
        series: name -> points (x, y); for bars x is a name. published: the paper's, drawn dashed.
    """

    kind: Literal["lines", "bars"]
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    published: Mapping[str, Sequence[tuple[float | str, float]]] = field(default_factory=dict)


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(plot: Plot, path: Path) -> bool:
    """Draw to a PNG, whole or not at all.

    Returns:
        Whether it was drawn; False where matplotlib is not installed.
    """
    if not available():
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if plot.kind == "lines":
        for name, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        for name, points in plot.published.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="x", linestyle="--", label=name)
    else:
        everything = {**plot.series, **plot.published}
        names = list(dict.fromkeys(x for points in everything.values() for x, _ in points))
        width = 0.8 / max(len(everything), 1)
        for place, (name, points) in enumerate(everything.items()):
            at = [names.index(x) + (place - (len(everything) - 1) / 2) * width for x, _ in points]
            fill = name in plot.series
            axes.bar(at, [y for _, y in points], width, label=name, fill=fill, linestyle="-" if fill else "--")
        axes.set_xticks(range(len(names)), [str(n) for n in names], rotation=20, ha="right")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    return True
