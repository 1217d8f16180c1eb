"""``specdiff ngram``: train n-gram models over token ids, and look at them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdiff.chat import chat_ids
from specdiff.checking import integer
from specdiff.cli.models import print_json
from specdiff.cli.show import folding_table
from specdiff.corpus import prompts as sources
from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.corpus.problems import BrokenRowError, CorpusError
from specdiff.corpus.read import Source, find_sources, scan
from specdiff.errors import InputError
from specdiff.hub import ModelStore
from specdiff.ngram.arpa import ArpaHeader, read_header
from specdiff.ngram.kneser_ney import Progress
from specdiff.ngram.train import train as train_model

app = typer.Typer(no_args_is_help=True, help="N-gram models over token ids, for the path search of drafts.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


@app.command()
def train(
    source: Annotated[
        list[Path], typer.Argument(help="Folders of corpora; or a text file (paragraphs) or JSON lines, with --target.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The ARPA file; replaced if there.")],
    order: Annotated[int, typer.Option("--order", help="Longest n-gram.")] = 3,
    limit: Annotated[int | None, typer.Option("--limit", help="Most answers or texts.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Whose tokenizer: needed for texts, checked for corpora.")
    ] = None,
    field: Annotated[str, typer.Option("--field", help="Field of JSON lines with the text or messages.")] = "text",
    with_prompts: Annotated[
        bool, typer.Option("--with-prompts", help="Count the prompt before each answer of a corpus too.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate a model with modified Kneser-Ney smoothing. Ids of a corpus are taken as they are."""
    integer("--order", order, 1, remedy="3 is usual")
    if limit is not None:
        integer("--limit", limit, 1, remedy="leave it out for all")
    corpora = [path.is_dir() for path in source]
    if any(corpora) and not all(corpora):
        raise InputError.of(
            "source", expected="folders of corpora, or files of text", got=[str(p) for p in source],
            remedy="train on one kind; a row file of a corpus is read through its folder",
        )  # fmt: skip
    missing = next((path for path in source if not path.exists()), None)
    if missing is not None:
        raise InputError.of("source", expected="a folder or file", got=str(missing), remedy="check the path")
    if not any(corpora) and target is None:
        raise InputError.of("--target", expected="whose tokenizer reads the text", got="none", remedy="name a target")
    tokenizer = None if target is None else _tokenizer(target, trust_remote_code)
    expected = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    if all(corpora):
        found = find_sources(source)
        fingerprint = _agreed(source, found, expected)
        sequences = _answers(found, with_prompts=with_prompts)
    else:
        fingerprint = cast(str, expected)
        sequences = _texts(source, cast(PreTrainedTokenizerBase, tokenizer), field)
    record = {"files": [path.name for path in source], "limit": limit, "with_prompts": with_prompts}
    log = Console(stderr=True, highlight=False, quiet=as_json)
    began = time.perf_counter()
    with _bars(log) as report:
        header = train_model(
            islice(sequences, limit), out, order=order, tokenizer_fingerprint=fingerprint, source=record,
            progress=report,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"file": str(out), "seconds": round(seconds, 3), **header.to_json()})
        return
    if header.fallback:
        lengths = ", ".join(map(str, header.fallback))
        log.print(f"too little text for discounts of n-grams of length {lengths}: fixed ones are used", style="yellow")
    log.print(
        f"{sum(header.counts)} n-grams of {header.tokens} tokens in {header.sequences} texts, {seconds:.1f} s: {out}",
        soft_wrap=True,
    )


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="An ARPA file.")],
    as_json: AsJson = False,
) -> None:
    """What an ARPA file says of itself: order, counts, tokenizer, discounts."""
    header = read_header(file)
    if as_json:
        print_json(header.to_json())
        return
    table = folding_table()
    for name, value in _readable(header):
        table.add_row(f"[bold]{name}[/]", value)
    Console(highlight=False).print(table)


def _readable(header: ArpaHeader) -> Iterator[tuple[str, str]]:
    yield "order", str(header.order)
    yield "n-grams", ", ".join(f"{n}: {count}" for n, count in enumerate(header.counts, start=1))
    yield "tokenizer", header.tokenizer_fingerprint or "unknown"
    if header.tokens:
        yield "estimated from", f"{header.tokens} tokens in {header.sequences} texts"
    for n, amounts in enumerate(header.discounts, start=1):
        fixed = " (fixed, too little text)" if n in header.fallback else ""
        yield f"discounts {n}", ", ".join(f"{a:.4f}" for a in amounts) + fixed
    if header.source:
        yield "source", ", ".join(f"{key} {value}" for key, value in header.source.items())


def _tokenizer(target: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    where = ModelStore().resolve(target, pull=True, allow_remote_code=trust_remote_code)
    return AutoTokenizer.from_pretrained(where.source, trust_remote_code=trust_remote_code)


def _agreed(paths: Sequence[Path], found: Sequence[Source], expected: str | None) -> str:
    """The tokenizer whose ids all corpora hold."""
    for path, source in zip(paths, found, strict=True):
        made_by = cast(Any, source.manifest).target  # a folder without a manifest is no corpus
        expected = expected or made_by.tokenizer_fingerprint
        if made_by.tokenizer_fingerprint != expected:
            raise CorpusError(
                f"{path}: rows of another tokenizer: expected {expected}, got {made_by.tokenizer_fingerprint} "
                f"({made_by.name}); train on corpora of one tokenizer, that of --target where it is given"
            )
    return cast(str, expected)


def _answers(found: Sequence[Source], *, with_prompts: bool) -> Iterator[Sequence[int]]:
    rows = 0
    for row in chain.from_iterable(scan([source]) for source in found):  # corpora may share prompts
        if isinstance(row, BrokenRowError):
            raise row
        rows += 1
        yield (*row.prompt_ids, *row.ids) if with_prompts else row.ids
    if not rows:
        raise CorpusError("corpus: expected at least one row, got none; make it first")


def _texts(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, field: str) -> Iterator[Sequence[int]]:
    for path in paths:
        if path.suffix == ".jsonl":
            for item in sources.read_jsonl(path, field=field):
                if isinstance(item.content, str):
                    yield _ids(tokenizer, item.content)
                elif getattr(tokenizer, "chat_template", None):
                    yield chat_ids(tokenizer, item.content)
                else:
                    raise InputError.of(
                        field, expected="texts, for a tokenizer without a chat template", got="messages",
                        remedy="name another with --field",
                    )  # fmt: skip
        else:
            for paragraph in _paragraphs(path):
                yield _ids(tokenizer, paragraph)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return cast("list[int]", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _paragraphs(path: Path) -> Iterator[str]:
    """Texts between blank lines, with the line breaks within them."""
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines)
                    lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}); check the path and encoding") from error
    if lines:
        yield "".join(lines)


@contextmanager
def _bars(log: Console) -> Generator[Progress]:
    """A bar a stage; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Bar(*columns, console=log, transient=True, disable=log.quiet or not log.is_terminal) as bar:

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=None)
            bar.update(tasks[stage], completed=done, total=total)

        yield report
