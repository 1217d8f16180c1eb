"""``specdiff corpus``: make answers of a target, look at them, check them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdiff.cli import options as o
from specdiff.cli.models import print_json
from specdiff.cli.show import folding_table
from specdiff.corpus import prompts as sources
from specdiff.corpus.backend import BackendSpec
from specdiff.corpus.identity import context_of, encode_prompts, identify, localise
from specdiff.corpus.make import Progress, make_corpus
from specdiff.corpus.manifest import CorpusManifest, TargetIdentity
from specdiff.corpus.plan import Batching, Sampling, Shard
from specdiff.corpus.presets import find_preset
from specdiff.corpus.specs import ServerSpec, TransformersSpec, VllmSpec
from specdiff.corpus.stats import COVERAGES, QUANTILES, CorpusStats, corpus_stats, write_vocabulary
from specdiff.errors import InputError
from specdiff.hub import ModelStore

app = typer.Typer(no_args_is_help=True, help="Answers of a target to many prompts, to align drafters with.")

Paths = Annotated[list[Path], typer.Argument(help="Folders of corpora, or row files.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
_ROWS = {"transformers": 32, "vllm": 256, "server": 64}


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where the corpus goes; an unfinished one there is continued.")],
    prompts: Annotated[Path | None, typer.Option("--prompts", help="Prompts: JSON lines.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Prompts: a data set of the hub, streamed.")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Prompts: specdiff2-qwen or specdiff2-llama, the paper's mixtures.")
    ] = None,
    field: Annotated[str, typer.Option("--field", help="Field with the text or the chat messages.")] = "prompt",
    id_field: Annotated[str | None, typer.Option("--id-field", help="Field with a prompt's name.")] = None,
    config: Annotated[str | None, typer.Option("--config", help="Configuration of the data set.")] = None,
    split: Annotated[str, typer.Option("--split", help="Split of the data set.")] = "train",
    skip: Annotated[int, typer.Option("--skip", help="Leave out the first prompts.")] = 0,
    limit: Annotated[int | None, typer.Option("--limit", help="Most prompts.")] = None,
    target: o.Target = "smollm2-135m",
    samples: Annotated[int | None, typer.Option("--samples", "-k", help="Answers a prompt; default 1.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0 = argmax; default 1.")] = None,
    top_p: o.TopP = 1.0,
    max_new_tokens: o.MaxNewTokens = 512,
    seed: o.Seed = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the chat template; default: if there is one.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="transformers or vllm.")] = "transformers",
    server: Annotated[str | None, typer.Option("--server", help="Address of a vLLM server that runs it.")] = None,
    server_model: Annotated[str, typer.Option("--server-model", help="Its name there.")] = "",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    tf32: o.Tf32 = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", help="Most rows computed together.")] = None,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="Most cache slots of a batch.")] = 32768,
    shard: Annotated[str, typer.Option("--shard", help="i/n: the i-th of n parts, for n machines.")] = "1/1",
    workers: Annotated[int, typer.Option("--workers", help="Processes on this machine, one model each.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Make a corpus. After a crash or a kill, the same command goes on where it was: no row is lost or made twice."""
    kind = "server" if server else backend
    if kind not in _ROWS or (kind != "transformers" and workers > 1):
        raise InputError.of(
            "--backend",
            expected="transformers, or vllm with --workers 1",
            got=f"{kind} with --workers {workers}",
            remedy="vLLM batches by itself; use --shard for several engines",
        )
    part = Shard.parse(shard)
    mixture = find_preset(preset) if preset else None
    sampling = Sampling(
        temperature=temperature if temperature is not None else mixture.temperature if mixture else 1.0,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        samples=samples if samples is not None else mixture.samples if mixture and temperature != 0 else 1,
        seed=seed,
    )
    log = Console(stderr=True, highlight=False, quiet=as_json)
    where = ModelStore().resolve(target, pull=True, allow_remote_code=trust_remote_code)
    if kind != "server":
        where = localise(where, allow_remote_code=trust_remote_code)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        where.source, trust_remote_code=trust_remote_code
    )
    taken, source = _prompts(prompts, dataset, preset, field, id_field, config, split, skip, limit)
    context = context_of(where.source, trust_remote_code=trust_remote_code)
    longest = None if context is None else context - max_new_tokens
    encoded, record = encode_prompts(taken, tokenizer, chat=chat, longest=longest, source=source)
    if record.left_out:
        log.print(f"{len(record.left_out)} prompts are longer than {longest} tokens and are left out", style="yellow")
    identity = identify(where, tokenizer, dtype=dtype, trust_remote_code=trust_remote_code)
    spec = _spec(kind, where.source, identity, dtype, device, tf32, trust_remote_code, server, server_model)
    manifest = CorpusManifest(
        target=identity,
        prompts=record,
        sampling=sampling,
        batching=Batching(rows=batch or _ROWS[kind], tokens=batch_tokens),
        backend=spec.describe(),
    )
    with _bar(log) as (progress, elapsed):
        end = make_corpus(folder, encoded, spec, manifest, shard=part, workers=workers, progress=progress)
        seconds = elapsed()
    if as_json:
        print_json({"folder": str(folder), "rows": end.rows, "new_rows": end.new_rows, "new_tokens": end.new_tokens,
                    "seconds": round(seconds, 3), "manifest": manifest.to_json()})  # fmt: skip
        return
    rate = f", {end.new_tokens / seconds:.0f} tokens/s" if seconds and end.new_tokens else ""
    log.print(f"{end.rows} of {end.total} rows ({end.new_rows} new, {end.new_tokens} tokens{rate}): {folder}")


@app.command()
def stats(
    paths: Paths,
    vocab_out: Annotated[
        Path | None, typer.Option("--vocab-out", help="Write a draft vocabulary: a JSON list.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", help="Tokens of it.")] = None,
    vocab_coverage: Annotated[float | None, typer.Option("--vocab-coverage", help="Or the share it covers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lengths, token coverage, duplicates, cut-off answers; exit code 1 if lines are broken."""
    found = corpus_stats(paths)
    log = Console(stderr=True, highlight=False, quiet=as_json)
    if vocab_out is not None:
        coverage = 0.999 if vocab_size is None and vocab_coverage is None else vocab_coverage
        count = write_vocabulary(vocab_out, found, coverage=coverage, size=vocab_size)
        log.print(f"{count} tokens: {vocab_out}")
    if as_json:
        print_json(found.to_json())
    else:
        _print_stats(Console(highlight=False), found)
        _print_broken(log, found)
    if found.broken:
        raise typer.Exit(1)


@app.command()
def check(paths: Paths, as_json: AsJson = False) -> None:
    """Check every line; exit code 1 if one is broken or rows are missing."""
    found = corpus_stats(paths)
    missing = max(0, (found.expected or 0) - found.rows)
    if as_json:
        print_json({"rows": found.rows, "missing": missing, "broken": found.to_json()["broken"]})
    else:
        log = Console(stderr=True, highlight=False)
        _print_broken(log, found)
        log.print(f"{found.rows} rows are sound, {len(found.broken)} lines are broken, {missing} rows are missing")
    if found.broken or missing:
        raise typer.Exit(1)


def _prompts(
    file: Path | None,
    dataset: str | None,
    preset: str | None,
    field: str,
    id_field: str | None,
    config: str | None,
    split: str,
    skip: int,
    limit: int | None,
) -> tuple[list[sources.Prompt], dict[str, Any]]:
    if sum(x is not None for x in (file, dataset, preset)) != 1:
        raise InputError.of(
            "prompts", expected="one of --prompts, --dataset and --preset", got="none or several", remedy="give one"
        )
    if file is not None:
        name = id_field or "id"
        taken = sources.take(sources.read_jsonl(file, field=field, id_field=name), skip=skip, limit=limit)
        return taken, sources.file_source(file, field=field, id_field=name, skip=skip, limit=limit)
    if dataset is not None:
        part = sources.DatasetPart(
            dataset=dataset, config=config, split=split, fields=(field,), id_field=id_field, label=dataset
        )
        taken = sources.take(sources.stream_part(part), skip=skip, limit=limit)
        return taken, sources.dataset_source([part], skip=skip, limit=limit)
    if skip:
        raise InputError.of("--skip", expected="0 with --preset", got=skip, remedy="leave it out")
    mixture = find_preset(preset or "")
    taken = sources.take_shares(map(sources.stream_part, mixture.parts), limit or mixture.prompts)
    return taken, sources.dataset_source(mixture.parts, skip=0, limit=limit or mixture.prompts)


def _spec(
    kind: str,
    source: str,
    identity: TargetIdentity,
    dtype: str,
    device: str | None,
    tf32: bool,
    trust_remote_code: bool,
    server: str | None,
    server_model: str,
) -> BackendSpec:
    if kind == "server":
        return ServerSpec(url=server or "", eos_ids=identity.eos_ids, model=server_model)
    if kind == "vllm":
        options = {"trust_remote_code": True} if trust_remote_code else {}
        return VllmSpec(source=source, eos_ids=identity.eos_ids, dtype=dtype, options=options)
    return TransformersSpec(source=source, dtype=dtype, device=device, tf32=tf32, trust_remote_code=trust_remote_code)


@contextmanager
def _bar(log: Console) -> Iterator[tuple[Callable[[Progress], None], Callable[[], float]]]:
    """A progress bar of rows with the time left and the rate; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    with Bar(*columns, console=log, transient=True, disable=log.quiet or not log.is_terminal) as bar:
        task = bar.add_task("rows", total=None, rate="")
        began = time.perf_counter()

        def elapsed() -> float:
            return time.perf_counter() - began

        def report(progress: Progress) -> None:
            nonlocal began
            if not progress.new_tokens:  # still loading the model
                began = time.perf_counter()
            rate = f"{progress.new_tokens / elapsed():.0f} tokens/s" if progress.new_tokens and elapsed() else ""
            bar.update(task, completed=progress.rows, total=progress.total, rate=rate)

        yield report, elapsed


def _print_stats(console: Console, found: CorpusStats) -> None:
    table = folding_table()
    expected = "" if found.expected is None else f" of {found.expected}"
    table.add_row("rows", f"{found.rows}{expected}, {found.prompts} prompts, {found.tokens} answer tokens")
    for name, lengths in (("prompt", found.prompt_lengths), ("answer", found.answer_lengths)):
        shown = ", ".join(f"{q:.0%} {n}" for q, n in zip(QUANTILES, lengths, strict=False))
        table.add_row(f"{name} tokens", shown)
    shown = ", ".join(f"{c:.1%} {n}" for c, n in zip(COVERAGES, found.coverage, strict=False))
    table.add_row("distinct tokens that cover", shown)
    table.add_row("finish", ", ".join(f"{name} {count}" for name, count in found.finish.items()))
    table.add_row("cut off", str(found.finish.get("length", 0)))
    table.add_row("duplicate answers", str(found.duplicate_answers))
    table.add_row("mean log-probability", f"{found.mean_logprob:.4f}")
    table.add_row("broken lines", str(len(found.broken)))
    console.print(table)


def _print_broken(log: Console, found: CorpusStats) -> None:
    for error in found.broken:
        log.print(str(error), style="red", markup=False, soft_wrap=True)
