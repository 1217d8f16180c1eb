"""Make a corpus, or go on making one: answer what is missing, commit every row as it finishes.

    for group in the shard's groups with a row missing:
        for rows in backend.answer(group):
            writer.append(rows that are missing)

A group of which some rows are there already is answered again as a whole, since its rows are computed together (see
`specdiff.corpus.plan`); only the missing ones are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from specdiff.checking import integer
from specdiff.corpus.backend import Backend, BackendSpec
from specdiff.corpus.folder import opened, row_file, writing
from specdiff.corpus.manifest import CorpusManifest
from specdiff.corpus.plan import EncodedPrompt, Group, Job, Shard, plan_groups
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.corpus.workers import run_workers
from specdiff.corpus.writer import RowWriter

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Told after every commit.

    Attributes:
        rows: of this shard that are committed, total: of all it has.
        new_rows, new_tokens: made by this run.
    """

    rows: int
    total: int
    new_rows: int
    new_tokens: int


def make_corpus(
    folder: Path,
    prompts: Sequence[EncodedPrompt],
    spec: BackendSpec,
    manifest: CorpusManifest,
    *,
    shard: Shard | None = None,
    workers: int = 1,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Make the rows of one shard that are not there yet.

    Args:
        folder: of the corpus; made if it is not there.
        prompts: as in the manifest. spec: who answers them. manifest: what is asked for.
        shard: which part; None = all. workers: processes on this machine, each with a model of its own.
        progress: told how far it is.

    Returns:
        Where it ended.

    Raises:
        CorpusError: the folder holds another corpus, or a process that makes the same rows is running.
        CorpusWriteError: the disk is full or not to be written. WorkerError: a worker died. In both cases, and after
            any other exception or a kill, the same call continues the corpus.
    """
    part = shard or Shard()
    integer("workers", workers, 1, remedy=f"use 1 to {MAX_WORKERS}")
    if workers > MAX_WORKERS:
        raise CorpusError(f"workers: expected at most {MAX_WORKERS}, got {workers}; use shards on further machines")
    if len(prompts) != manifest.prompts.count:
        raise CorpusError(f"prompts: expected the manifest's {manifest.prompts.count}, got {len(prompts)}")
    groups = part.of(plan_groups(prompts, manifest.sampling, manifest.batching))
    with opened(folder, manifest, part) as done:
        total = sum(map(len, groups))
        present = sum(job.key in done for group in groups for job in group)
        missing = [group for group in groups if any(job.key not in done for job in group)]
        state = Progress(rows=present, total=total, new_rows=0, new_tokens=0)
        progress(state)

        def report(new_rows: int, new_tokens: int) -> None:
            nonlocal state
            state = Progress(rows=present + new_rows, total=total, new_rows=new_rows, new_tokens=new_tokens)
            progress(state)

        if not missing:
            return state
        workers = min(workers, len(missing))
        paths = [row_file(folder, part, worker) for worker in range(workers)]
        if workers == 1:
            write_groups(paths[0], missing, spec.open(manifest.sampling), done, report)
        else:
            shares = [missing[worker::workers] for worker in range(workers)]
            run_workers(paths, shares, spec, manifest.sampling, done, report, write_groups)
    return state


def write_groups(
    path: Path,
    groups: Iterable[Group],
    backend: Backend,
    done: Set[tuple[str, int]],
    report: Callable[[int, int], None],
) -> None:
    """Answer groups and append their missing rows to one file.

    Args:
        path: the file. groups: what to answer. backend: who answers. done: keys of the rows that are there.
        report: told rows and tokens written so far; called before the first and after every commit.
    """
    rows = tokens = 0
    with writing(path):
        writer = RowWriter(path)
        try:
            for group in groups:
                report(rows, tokens)
                wanted = {job.key: job for job in group}
                for finished in backend.answer(group):
                    for row in finished:
                        _check(row, wanted)
                    new = [row for row in finished if row.key not in done]
                    if new:
                        writer.append([row.to_line() for row in new])
                        rows, tokens = rows + len(new), tokens + sum(len(row.ids) for row in new)
                    report(rows, tokens)
                if wanted:
                    raise CorpusError(f"backend: answered a group without {sorted(wanted)[:3]}; this is a fault of it")
        finally:
            writer.close()


def _check(row: CorpusRow, wanted: dict[tuple[str, int], Job]) -> None:
    if wanted.pop(row.key, None) is None:
        raise CorpusError(f"backend: answered {row.key}, which was not asked for or came twice; this is a fault of it")
