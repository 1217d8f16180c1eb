"""``specdiff repro``: the papers' tables and figures at this machine's scale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from specdiff.cli import options as o
from specdiff.cli.distill import parse_corpus, parse_layers
from specdiff.decoder import SpeculativeDecoder, load
from specdiff.errors import InputError
from specdiff.models.target import CausalTarget
from specdiff.repro import diffuspec as paper_diffuspec
from specdiff.repro import human_text as texts
from specdiff.repro import specdiff2 as decoding
from specdiff.repro import specdiff2_training as training
from specdiff.repro.grid import Pair
from specdiff.repro.plots import available
from specdiff.repro.progress import Progress
from specdiff.repro.prompts import read_tasks
from specdiff.repro.report import Report, write_report
from specdiff.repro.settings import DrafterSpec
from specdiff.repro.study import Options
from specdiff.repro.training import HELD_OUT_LOSS, Scale, Workshop

_COMMON = frozenset({"prompts", "limit", "tokens", "out", "target", "dtype", "device", "device_map", "seed"})
_TRAINS = frozenset({
    "corpus", "human", "runs", "steps", "unaligned_steps", "layers", "window", "draft_vocab", "rows", "anchors",
    "held_out", "learning_rate",
})  # fmt: skip
_USED = {
    "table": {"drafter", "unaligned", "pair", "k", "draft_temperature"},
    "figure2": _TRAINS,
    "figure5": {"drafter", "gamma", "grid_k", "grid_temperatures"},
    "figure7": {*_TRAINS, "points"},
    "figure8": {"drafter", "gamma", "grid_steps"},
    "figure9": {"drafter", "gamma", "grid_steps"},
    "figure10": {"drafter", "gammas", "k", "draft_temperature"},
    "figure11": {"drafter", "gammas", "grid_steps"},
    "figure12": _TRAINS,
    "corpus": _TRAINS,
    "gain": {*_TRAINS, "k", "draft_temperature"},
}
"""Options that each table, figure or study reads, beside the common ones."""

app = typer.Typer(no_args_is_help=True, help="Reproduce the papers' tables and figures at this machine's scale.")

Prompts = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help="JSON lines with 'prompt', 'id' and 'task' (the group); may be repeated."),
]
Limit = Annotated[int | None, typer.Option("--limit", help="Most prompts in all, from the groups in turns.")]
Tokens = Annotated[int, typer.Option("--tokens", help="Most new tokens of each prompt.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of rows and report; default repro/STUDY.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the drafters that are trained; finished ones are used.")]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="Spread the target over devices, as accelerate does: 'auto'.")
]
Human = Annotated[Path | None, typer.Option("--human", help="Rows of human text (specdiff repro human-text).")]
Layers = Annotated[str | None, typer.Option("--layers", help="Target layers to start from; default the first fifth.")]
Window = Annotated[int, typer.Option("--window", help="Tokens drafted in one pass.")]
DraftVocab = Annotated[int, typer.Option("--draft-vocab", help="Tokens it may propose.")]
Rows = Annotated[int, typer.Option("--rows", help="Texts of a batch.")]
Anchors = Annotated[int, typer.Option("--anchors", help="Windows of a text.")]
HeldOut = Annotated[int, typer.Option("--held-out", help="Texts, or prompts of the corpora, kept out of training.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="Peak.")]
UnalignedSteps = Annotated[int, typer.Option("--unaligned-steps", help="Of training on human text.")]


@app.command("diffuspec")
def diffuspec(
    prompts: Prompts = None,
    limit: Limit = None,
    tokens: Tokens = 128,
    out: Out = None,
    target: o.Target = "smollm2-135m",
    drafter: o.Drafter = "default",
    ngram: Annotated[str, typer.Option("--ngram", help="As for generate.")] = "prompt",
    fixed: Annotated[
        str | None,
        typer.Option("--fixed", help="Draft lengths, such as 4,8; default the paper's, scaled."),
    ] = None,
    steps: Annotated[str, typer.Option("--steps", help="Numbers of denoising steps.")] = "1,2,3,4,5,6,7,8,9,10",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    device_map: DeviceMap = None,
    seed: o.Seed = 0,
) -> None:
    """DiffuSpec: ablation, fixed against adaptive length, denoising steps, categories, cost of the search."""
    folder = out or Path("repro/diffuspec")
    with _progress() as progress:
        options = Options(
            out=folder, prompts=tuple(read_tasks(prompts or [], limit)), tokens=tokens, seed=seed, progress=progress
        )
        pair = Pair(load(target, "none", dtype=dtype, device=device, device_map=device_map), folder)
        report = paper_diffuspec.run(
            pair,
            drafter,
            options,
            ngram=ngram,
            fixed=None if fixed is None else _numbers("--fixed", fixed),
            steps=_numbers("--steps", steps),
            training=_training_of(drafter),
        )
    _finish(report, folder)


@app.command("specdiff2")
def specdiff2(
    context: typer.Context,
    figure: Annotated[int | None, typer.Option("--figure", help="2, 5, 7, 8, 9, 10, 11 or 12.")] = None,
    table: Annotated[int | None, typer.Option("--table", help="2, 3 or 4.")] = None,
    study: Annotated[str | None, typer.Option("--study", help="corpus or gain.")] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    tokens: Tokens = 128,
    out: Out = None,
    target: o.Target = "smollm2-135m",
    drafter: Annotated[str, typer.Option("--drafter", help="The aligned drafter, of tables and figures 5 to 11.")] = (
        "default"
    ),
    unaligned: Annotated[str | None, typer.Option("--unaligned", help="The unaligned drafter, of tables.")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option("--pair", help="TARGET,UNALIGNED,ALIGNED: a further target of a table; may be repeated."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            "-t",
            help="Of the target; tables take several. Default: tables 0 and 1, gain 1, else 0 (figure 5: 1).",
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Drafts that self-selection chooses from.")] = decoding.K,
    draft_temperature: o.DraftTemperature = 1.0,
    gamma: o.Gamma = None,
    grid_k: Annotated[str | None, typer.Option("--ks", help="Figure 5: numbers of drafts.")] = None,
    grid_temperatures: Annotated[
        str | None, typer.Option("--draft-temperatures", help="Figure 5: draft temperatures.")
    ] = None,
    grid_steps: Annotated[str | None, typer.Option("--denoising", help="Figures 8, 9 and 11: denoising steps.")] = None,
    gammas: Annotated[str | None, typer.Option("--gammas", help="Figures 10 and 11: draft windows.")] = None,
    corpus: Annotated[
        list[str] | None, typer.Option("--corpus", help="FOLDER or FOLDER:WEIGHT of the target's answers; to train on.")
    ] = None,
    human: Human = None,
    runs: Runs = Path("repro/runs"),
    steps: Annotated[int, typer.Option("--steps", help="Of each objective, from the unaligned one.")] = Scale.steps,
    points: Annotated[str | None, typer.Option("--points", help="Figure 7: numbers of steps.")] = None,
    unaligned_steps: UnalignedSteps = Scale.unaligned_steps,
    layers: Layers = None,
    window: Window = Scale.window,
    draft_vocab: DraftVocab = Scale.draft_vocab_size,
    rows: Rows = Scale.rows,
    anchors: Anchors = Scale.anchors,
    held_out: HeldOut = Scale.held_out,
    learning_rate: Rate = Scale.learning_rate,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")] = "bf16",
    device: o.Device = None,
    device_map: DeviceMap = None,
    seed: o.Seed = 0,
) -> None:
    """SpecDiff-2: one table, figure or study; figures 2, 7, 12 and the studies train what they compare."""
    name = _chosen(figure, table, study)
    _refuse_unused(context, name)
    folder = out or Path("repro") / f"specdiff2-{name}"
    several = tuple(temperature) if temperature else (0.0, 1.0)
    if table is None and temperature and len(temperature) > 1:
        raise InputError.of("--temperature", expected="one, but for tables", got=several, remedy="run the study again")
    one = temperature[0] if temperature else 1.0 if name in ("figure5", "gain") else 0.0
    with _progress() as progress:
        options = Options(
            out=folder, prompts=tuple(read_tasks(prompts or [], limit)), tokens=tokens, seed=seed, progress=progress
        )
        loaded = Pair(load(target, "none", dtype=dtype, device=device, device_map=device_map), folder)
        aligned = DrafterSpec(name=drafter)
        if table is not None:
            if unaligned is None:
                raise InputError.of(
                    "--unaligned", expected="the unaligned drafter of a table", got=None,
                    remedy="train one: specdiff repro unaligned",
                )  # fmt: skip
            pairs = {target: (loaded, DrafterSpec(name=unaligned, label="unaligned"), aligned)}
            for text in pair or ():
                other, first, second = _pair(text)
                decoder = load(other, "none", dtype=dtype, device=device, device_map=device_map)
                pairs[other] = (
                    Pair(decoder, folder), DrafterSpec(name=first, label="unaligned"), DrafterSpec(name=second)
                )  # fmt: skip
            report = decoding.tables(
                table, pairs, options, temperatures=several, k=k, draft_temperature=draft_temperature
            )
        elif name == "figure5":
            report = decoding.figure5(
                loaded, aligned, options, temperature=one, gamma=gamma,
                ks=_numbers("--ks", grid_k) if grid_k else decoding.KS,
                draft_temperatures=_reals("--draft-temperatures", grid_temperatures)
                if grid_temperatures else decoding.DRAFT_TEMPERATURES,
            )  # fmt: skip
        elif name in ("figure8", "figure9"):
            assert figure is not None
            report = decoding.denoising(
                figure, loaded, aligned, options, temperature=one, gamma=gamma,
                steps=_numbers("--denoising", grid_steps) if grid_steps else decoding.STEPS,
            )  # fmt: skip
        elif name == "figure10":
            report = decoding.figure10(
                loaded, aligned, options, temperature=one, k=k, draft_temperature=draft_temperature,
                gammas=_numbers("--gammas", gammas) if gammas else None,
            )  # fmt: skip
        elif name == "figure11":
            report = decoding.figure11(
                loaded, aligned, options, temperature=one, gammas=_numbers("--gammas", gammas) if gammas else None,
                steps=_numbers("--denoising", grid_steps) if grid_steps else decoding.STEPS,
            )  # fmt: skip
        else:
            scale = Scale(
                layers=None if layers is None else parse_layers("--layers", layers), window=window,
                draft_vocab_size=draft_vocab, dtype=dtype, rows=rows, anchors=anchors, learning_rate=learning_rate,
                seed=seed, unaligned_steps=unaligned_steps, steps=steps, held_out=held_out,
            )  # fmt: skip
            material = training.Material(
                workshop=_workshop(loaded.base, runs, scale, progress),
                human=_needed("--human", human, "make them: specdiff repro human-text"),
                corpora=[parse_corpus(text) for text in corpus or ()],
            )
            if not corpus:
                raise InputError.of("--corpus", expected="the target's answers to train on", got=None,
                                    remedy="make them: specdiff corpus make")  # fmt: skip
            report = _trained(name, loaded, material, options, one, points, k, draft_temperature)
    _finish(report, folder)


@app.command("human-text")
def human_text(
    output: Annotated[Path, typer.Argument(help="File of rows to write.")],
    source: Annotated[
        list[Path] | None, typer.Option("--source", help="JSON lines with 'id', 'prompt' and 'reference'; repeatable.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Keep lines of this 'split', and those without one.")] = (
        None
    ),
    exclude_from: Annotated[
        list[str] | None, typer.Option("--exclude-from", help="PREFIX/NUMBER: leave out ids from there on; repeatable.")
    ] = None,
    library: Annotated[int, typer.Option("--library", help="Pieces of Python's standard library; 0 = none.")] = 2000,
    length: Annotated[int, typer.Option("--length", help="Tokens of such a piece.")] = 256,
    target: o.Target = "smollm2-135m",
) -> None:
    """Rows of text that people wrote, to train a drafter that was never aligned to the target."""
    if library < 0:
        raise InputError.of("--library", expected=">= 0", got=library, remedy="0 takes none")
    decoder = load(target, "none", prepack=False)
    tokenizer = decoder.tokenizer
    assert tokenizer is not None  # `load` gives one
    rows = [
        row for path in source or () for row in
        texts.reference_rows(path, tokenizer, split=split, exclude_from=exclude_from or ())
    ]  # fmt: skip
    if library:
        rows += texts.library_rows(tokenizer, length=length, limit=library)
    count = texts.write_rows(output, rows)
    Console(stderr=True, highlight=False).print(f"{count} rows in {output}")


@app.command("unaligned")
def unaligned_(
    human: Human = None,
    runs: Runs = Path("repro/runs"),
    target: o.Target = "smollm2-135m",
    steps: UnalignedSteps = Scale.unaligned_steps,
    layers: Layers = None,
    window: Window = Scale.window,
    draft_vocab: DraftVocab = Scale.draft_vocab_size,
    rows: Rows = Scale.rows,
    anchors: Anchors = Scale.anchors,
    held_out: HeldOut = Scale.held_out,
    learning_rate: Rate = Scale.learning_rate,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")] = "bf16",
    device: o.Device = None,
    seed: o.Seed = 0,
) -> None:
    """Train a drafter on human text only, with the masked loss; print its loss on texts that were kept out."""
    scale = Scale(
        layers=None if layers is None else parse_layers("--layers", layers), window=window, dtype=dtype, rows=rows,
        draft_vocab_size=draft_vocab, anchors=anchors, learning_rate=learning_rate, seed=seed, unaligned_steps=steps,
        held_out=held_out,
    )  # fmt: skip
    path = _needed("--human", human, "make them: specdiff repro human-text")
    with _progress() as progress:
        made = _workshop(load(target, "none", dtype=dtype, device=device), runs, scale, progress).unaligned(path)
    print(json.dumps({"drafter": str(made.folder), **made.facts}))


def _trained(
    name: str, pair: Pair, material: training.Material, options: Options, temperature: float, points: str | None,
    k: int, draft_temperature: float,
) -> Report:  # fmt: skip
    if name == "figure2":
        return training.figure2(pair, material, options, temperature=temperature)
    if name == "figure7":
        total = material.workshop.scale.steps
        chosen = _numbers("--points", points) if points else tuple(sorted({max(1, total // d) for d in (8, 4, 2, 1)}))
        return training.figure7(pair, material, options, temperature=temperature, points=chosen)
    if name == "figure12":
        return training.figure12(pair, material, options, temperature=temperature)
    if name == "corpus":
        return training.corpus_study(pair, material, options, temperature=temperature)
    return training.gain_study(
        pair, material, options, temperature=temperature, k=k, draft_temperature=draft_temperature
    )


def _chosen(figure: int | None, table: int | None, study: str | None) -> str:
    given = [x for x in (figure, table, study) if x is not None]
    known = (*sorted({2, 7, 12} | set(decoding.FIGURES)),)
    if len(given) != 1:
        raise InputError.of("--figure, --table and --study", expected="exactly one of them", got=given or None,
                            remedy="such as --figure 2")  # fmt: skip
    if figure is not None and figure not in known:
        listed = ", ".join(map(str, known))
        raise InputError.of("--figure", expected=f"one of {listed}", got=figure, remedy="choose one")
    if table is not None and table not in (2, 3, 4):
        raise InputError.of("--table", expected="2, 3 or 4", got=table, remedy="choose one")
    if study is not None and study not in ("corpus", "gain"):
        raise InputError.of("--study", expected="corpus or gain", got=study, remedy="choose one")
    return f"figure{figure}" if figure is not None else f"table{table}" if table is not None else str(study)


def _refuse_unused(context: typer.Context, name: str) -> None:
    """Refuse options that the study would ignore."""
    used = {"figure", "table", "study", "temperature", *_COMMON}
    used |= _USED["table" if name.startswith("table") else name]
    for option in sorted(set(context.params) - used):
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":  # by name: typer may bring its own click
            raise InputError.of(
                f"option {option!r}", expected=f"an option of {name}", got=context.params[option], remedy="leave it out"
            )


def _workshop(decoder: SpeculativeDecoder, runs: Path, scale: Scale, progress: Progress) -> Workshop:
    assert isinstance(decoder.target, CausalTarget)
    assert decoder.tokenizer is not None
    return Workshop(decoder.target, decoder.tokenizer, runs, scale, progress=progress)


def _needed(option: str, path: Path | None, remedy: str) -> Path:
    if path is None or not path.is_file():
        raise InputError.of(option, expected="a readable file", got=None if path is None else str(path), remedy=remedy)
    return path


def _training_of(drafter: str) -> dict[str, Any]:
    """What a run of `unaligned` left beside its export: its loss on texts that were kept out."""
    path = Path(drafter).parent.parent / HELD_OUT_LOSS
    if not Path(drafter).is_dir() or not path.is_file():
        return {}
    return {"never aligned": {"held_out_loss": json.loads(path.read_text(encoding="utf-8"))}}


def _pair(text: str) -> tuple[str, str, str]:
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise InputError.of("--pair", expected="TARGET,UNALIGNED,ALIGNED", got=text, remedy="give all three")
    return parts[0], parts[1], parts[2]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in _reals(option, text, whole=True))


def _reals(option: str, text: str, *, whole: bool = False) -> tuple[float, ...]:
    try:
        numbers = tuple((int if whole else float)(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < n < float("inf") for n in numbers) or len(set(numbers)) != len(numbers):
        raise InputError.of(option, expected="different numbers > 0 with commas", got=text, remedy="such as 1,2,4")
    return numbers


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield told


def _finish(report: Report, folder: Path) -> None:
    files = write_report(report, folder)
    log = Console(stderr=True, highlight=False)
    if report.plot is not None and not available():
        log.print("no figure.png: matplotlib is not installed (specdiff[bench])", style="yellow")
    for path in files:
        print(path)
