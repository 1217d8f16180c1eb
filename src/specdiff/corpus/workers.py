"""Several processes on one machine, each with a model and a row file of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence, Set
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from specdiff.corpus.backend import Backend, BackendSpec
from specdiff.corpus.plan import Group, Sampling
from specdiff.corpus.problems import WorkerError
from specdiff.errors import SpecdiffError


class Work(Protocol):
    """What a worker does: `specdiff.corpus.make.write_groups`."""

    def __call__(
        self,
        path: Path,
        groups: Sequence[Group],
        backend: Backend,
        done: Set[tuple[str, int]],
        report: Callable[[int, int], None],
    ) -> None:
        """Write the rows of groups to a file."""
        ...


def run_workers(
    paths: Sequence[Path],
    shares: Sequence[Sequence[Group]],
    spec: BackendSpec,
    sampling: Sampling,
    done: Set[tuple[str, int]],
    report: Callable[[int, int], None],
    work: Work,
) -> None:
    """Run one process a share; returns when all are done.

    Args:
        paths: the file each writes. shares: the groups each answers. spec, sampling: how each opens its backend.
        done: keys of the rows that are there. report: told rows and tokens of all workers together.
        work: what each runs, a function of a module.

    Raises:
        SpecdiffError: what a worker raised. WorkerError: one died without a word. The others are ended first.
    """
    context = multiprocessing.get_context("spawn")
    counts = [(0, 0)] * len(shares)
    open_ends: dict[Connection, int] = {}
    processes: list[Any] = []
    try:
        for worker, (path, share) in enumerate(zip(paths, shares, strict=True)):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, path, share, spec, sampling, done, work, len(shares))
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            open_ends[ours] = worker
        while open_ends:
            for end in wait(list(open_ends)):
                assert isinstance(end, Connection)
                worker = open_ends[end]
                try:
                    message = end.recv()
                except (EOFError, OSError):
                    del open_ends[end]
                    processes[worker].join()
                    if processes[worker].exitcode != 0:
                        raise _died(worker, processes[worker].exitcode) from None
                    continue
                if isinstance(message, BaseException):
                    raise message
                counts[worker] = message
                report(sum(rows for rows, _ in counts), sum(tokens for _, tokens in counts))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _worker(
    end: Connection,
    path: Path,
    groups: Sequence[Group],
    spec: BackendSpec,
    sampling: Sampling,
    done: Set[tuple[str, int]],
    work: Work,
    workers: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # a share of the machine's cores each; libraries read it when they are loaded, which is after this
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(rows: int, tokens: int) -> None:
        end.send((rows, tokens))

    try:
        work(path, groups, spec.open(sampling), done, report)
    except SpecdiffError as error:
        end.send(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        end.send(WorkerError(f"worker: raised {error!r} at {Path(last.filename).name}:{last.lineno}"))
    finally:
        end.close()


def _end_with_parent() -> None:
    """A killed run must not leave workers that go on writing; being cut off mid-row is what rows are made for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _died(worker: int, code: int) -> WorkerError:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return WorkerError(
        f"worker {worker}: {how} before its work was done; every committed row is kept: run the same command again"
        + (" with fewer workers, if memory ran out" if code == -signal.SIGKILL else "")
    )
