"""A corpus on disk: its files, and the locks that keep two processes from making the same row.

::

    <folder>/manifest.json                what all rows have in common
    <folder>/rows-0001-of-0004-w00.jsonl  rows that worker 0 of shard 1/4 wrote; no other process writes to it
    <folder>/.locks/                      one lock a row file and one a running shard, held while it is written

Shards of one split may share a folder, or have one each. Locks belong to processes: a killed one holds none.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from specdiff.corpus.manifest import MANIFEST, CorpusManifest, adopt_manifest
from specdiff.corpus.plan import Shard
from specdiff.corpus.problems import Broken, BrokenRowError, CorpusError, CorpusWriteError
from specdiff.corpus.row import parse_line
from specdiff.corpus.writer import repair_tail

_PATIENCE = 20.0  # seconds for the workers of a killed run to notice that their parent is gone
_FILE = re.compile(r"rows-(\d{4})-of-(\d{4})-w(\d\d)\.jsonl")


def row_file(folder: Path, shard: Shard, worker: int) -> Path:
    """The file that one worker writes."""
    return folder / f"rows-{shard.index:04}-of-{shard.count:04}-w{worker:02}.jsonl"


def row_files(folder: Path) -> list[Path]:
    """The row files of a folder, sorted by name."""
    return sorted(path for path in folder.glob("rows-*.jsonl") if _FILE.fullmatch(path.name))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Hold the lock of a row file.

    Raises:
        CorpusError: another process holds it.
    """
    lock = _lock(path.parent, path.name)
    try:
        lock.acquire(timeout=_PATIENCE)
    except filelock.Timeout as error:
        raise CorpusError(f"{path}: another process is writing to it; wait for it, or end it") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def opened(folder: Path, manifest: CorpusManifest, shard: Shard) -> Iterator[set[tuple[str, int]]]:
    """Make or continue a corpus as ``shard``; yields the keys of the rows that are there already, from any shard.

    Raises:
        CorpusError: the folder holds another corpus, broken rows, or a process that makes the same rows is running.
        CorpusWriteError: the folder cannot be written.
    """
    try:
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusWriteError(f"{folder}: cannot be written ({error.strerror or error})") from error
    own = _lock(folder, f"shard-{shard.index:04}-of-{shard.count:04}")
    try:
        with _lock(folder, "folder"):
            if not (folder / MANIFEST).exists() and row_files(folder):
                raise CorpusError(f"{folder}: has rows but no {MANIFEST}; restore it, or choose another folder")
            adopted = adopt_manifest(folder, manifest)
            _refuse_rivals(folder, shard)
            done = _finished(folder, adopted)
            own.acquire(timeout=0)
        yield done
    finally:
        own.release()


def _lock(folder: Path, name: str) -> filelock.BaseFileLock:
    return filelock.FileLock(folder / ".locks" / f"{name}.lock")


def _refuse_rivals(folder: Path, shard: Shard) -> None:
    """Refuse to start beside a process that runs this shard too, or a shard of another split."""
    deadline = time.monotonic() + _PATIENCE
    allowed = f"-of-{shard.count:04}"
    for path in sorted((folder / ".locks").glob("*.lock")):
        name = path.name
        if name == "folder.lock" or (allowed in name and f"-{shard.index:04}{allowed}" not in name):
            continue
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        except filelock.Timeout as error:
            raise CorpusError(
                f"{folder}: shard {shard.index}/{shard.count} cannot start, another process is running "
                f"({name.removesuffix('.lock')}) whose rows overlap; wait for it, or end it"
            ) from error
        lock.release()


def _finished(folder: Path, manifest: CorpusManifest) -> set[tuple[str, int]]:
    """Keys of the committed rows; cuts off unfinished last lines of files that nobody is writing."""
    done: dict[tuple[str, int], tuple[Path, int]] = {}
    for path in row_files(folder):
        lock = _lock(folder, path.name)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            pass  # another shard is writing; its rows are not ours
        else:
            try:
                repair_tail(path)
            finally:
                lock.release()
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                target = manifest.target
                row = parse_line(line, path, number, vocab_size=target.vocab_size, eos_ids=target.eos_ids)
                if row.key in done:
                    other, at = done[row.key]
                    raise BrokenRowError(
                        path, number, Broken.DUPLICATE, f"{row.id!r} sample {row.sample} is also {other}, line {at}"
                    )
                done[row.key] = (path, number)
    return set(done)
