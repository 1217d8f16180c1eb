"""A corpus made by a process that is killed again and again is the corpus of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdiff.corpus import writer
from specdiff.corpus.fake import EOS, VOCAB, FakeSpec
from specdiff.corpus.folder import row_file, row_files
from specdiff.corpus.make import make_corpus
from specdiff.corpus.manifest import CorpusManifest, PromptRecord, TargetIdentity
from specdiff.corpus.plan import Batching, EncodedPrompt, Sampling, Shard
from specdiff.corpus.problems import CorpusWriteError, WorkerError
from specdiff.corpus.read import read_corpus
from specdiff.corpus.writer import RowWriter

PROMPTS = [EncodedPrompt(id=f"p/{i}", ids=(1, 2 + i)) for i in range(40)]
MANIFEST = CorpusManifest(
    target=TargetIdentity(
        name="fake", weights_fingerprint="", tables_fingerprint="", tokenizer_fingerprint="", vocab_size=VOCAB,
        eos_ids=(EOS,), dtype="float32",
    ),
    prompts=PromptRecord(source={}, count=40, sha256="", left_out=(), chat=False, chat_template_sha256=""),
    sampling=Sampling(max_new_tokens=24, samples=2),
    batching=Batching(rows=8),
    backend={"name": "fake"},
)  # fmt: skip
ROWS = 80

# What a killed process runs. It dies by its own hand after so many bytes of rows, or is killed from outside.
SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_corpus_kill import MANIFEST, PROMPTS
from specdiff.corpus import writer
from specdiff.corpus.fake import FakeSpec
from specdiff.corpus.make import make_corpus

left, workers, delay = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
write = os.write

def dying(file, data):
    global left
    if left >= 0 and len(data) > left:
        write(file, data[:left])
        os.kill(os.getpid(), signal.SIGKILL)
    left -= len(data) if left >= 0 else 0
    return write(file, data)

writer.os.write = dying
if __name__ == "__main__":
    make_corpus(Path(sys.argv[1]), PROMPTS, FakeSpec(delay=delay), MANIFEST, workers=workers)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    script = tmp_path / "make.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))

    def run(folder: Path, *, after: int = -1, workers: int = 1, delay: float = 0.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), str(folder), str(after), str(workers), str(delay)]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The row file of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    make_corpus(folder, PROMPTS, FakeSpec(), MANIFEST)
    return row_file(folder, Shard(), 0).read_bytes()


def lines(folder: Path) -> list[bytes]:
    return sorted(line for path in row_files(folder) for line in path.read_bytes().splitlines(keepends=True))


def killed(process: subprocess.Popen[bytes]) -> bool:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode == -signal.SIGKILL


def check_kills(points: list[int], folder: Path, whole: bytes, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Kill one run after another, each after so many bytes of new rows; then let one finish."""
    size = 0
    for after in points:
        assert killed(start(folder, after=after)), "expected the run to be killed before it was done"
        torn = row_file(folder, Shard(), 0).read_bytes()
        kept = torn[: torn.rfind(b"\n") + 1]
        assert whole.startswith(torn), "what was written is what an uninterrupted run writes"
        assert len(torn) == size + after
        size = len(kept)
    assert not killed(start(folder))
    assert row_file(folder, Shard(), 0).read_bytes() == whole
    assert len(read_corpus(folder).rows) == ROWS


def test_six_kills(tmp_path: Path, whole: bytes, start) -> None:
    first = whole.index(b"\n") + 1
    # before any byte, inside a line, before its newline, after it, and somewhere further
    check_kills([0, 1, first - 1, first, 2 * first + 100, len(whole) // 3], tmp_path / "corpus", whole, start)


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path, whole: bytes, start, figure) -> None:
    rng = random.Random(0)
    points = [rng.randrange(2 * len(whole) // 50) for _ in range(50)]
    check_kills(points, tmp_path / "corpus", whole, start)
    figure(14, "kills -9 of corpus making survived", kills=50)


def check_killed_from_outside(folder: Path, whole: bytes, start, *, kills: int, workers: int, seed: int) -> int:
    rng, count = random.Random(seed), 0
    for _ in range(kills):
        process = start(folder, workers=workers, delay=0.004)
        time.sleep(0.2 + rng.random() * 0.8)
        process.kill()
        count += killed(process)
    assert not killed(start(folder, workers=workers))
    assert lines(folder) == sorted(whole.splitlines(keepends=True))
    return count


def test_kills_at_any_time_with_workers(tmp_path: Path, whole: bytes, start) -> None:
    check_killed_from_outside(tmp_path / "corpus", whole, start, kills=2, workers=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_fifty_kills_at_any_time(tmp_path: Path, whole: bytes, start, workers: int, figure) -> None:
    kills = corpus = 0
    while kills < 50:  # a process that is done before its kill counts for nothing
        kills += check_killed_from_outside(
            tmp_path / f"corpus{corpus}", whole, start, kills=5, workers=workers, seed=corpus
        )
        corpus += 1
    figure(14, "kills -9 of corpus making at any time survived", kills=kills)


class _KillsItself(FakeSpec):
    """Opens a backend whose process is killed at its second group."""

    def open(self, sampling):
        backend = super().open(sampling)
        answered = 0

        class Doomed:
            def answer(self, group):
                nonlocal answered
                answered += 1
                if answered == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield from backend.answer(group)

        return Doomed()


class _Raises(FakeSpec):
    def open(self, sampling):
        raise RuntimeError("no model here")


def test_a_killed_worker_is_told_and_nothing_is_lost(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(WorkerError, match=r"worker \d: was killed by SIGKILL .* every committed row is kept"):
        make_corpus(tmp_path, PROMPTS, _KillsItself(), MANIFEST, workers=2)
    assert set(lines(tmp_path)) < set(whole.splitlines(keepends=True))
    make_corpus(tmp_path, PROMPTS, FakeSpec(), MANIFEST, workers=2)
    assert lines(tmp_path) == sorted(whole.splitlines(keepends=True))


def test_an_exception_of_a_worker_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"no model here.* at test_corpus_kill.py"):
        make_corpus(tmp_path, PROMPTS, _Raises(), MANIFEST, workers=2)


@pytest.mark.parametrize("failing", ["write", "fsync", "write, half of it"])
@pytest.mark.parametrize("call", [1, 5])
def test_a_full_disk_leaves_a_corpus_that_goes_on(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, failing: str, call: int
) -> None:
    write, fsync, calls = os.write, os.fsync, {"write": 0, "fsync": 0}

    def full(kind: str) -> bool:
        calls[kind] += 1
        others = 3 if kind == "fsync" else 0  # of the manifest, and of the folder after it and after the row file
        return failing.startswith(kind) and calls[kind] >= call + others

    def writing(file: int, data: bytes) -> int:
        if full("write"):
            if "half" in failing and calls["write"] == call:
                return write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(file, data)

    def syncing(file: int) -> None:
        if full("fsync"):
            raise OSError(28, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "write", writing)
        patch.setattr(writer.os, "fsync", syncing)
        with pytest.raises(CorpusWriteError, match=r"No space left on device.*run the same command again"):
            make_corpus(tmp_path, PROMPTS, FakeSpec(), MANIFEST)
    kept = row_file(tmp_path, Shard(), 0).read_bytes()
    assert whole.startswith(kept)
    assert kept.endswith(b"\n") or call == 1
    make_corpus(tmp_path, PROMPTS, FakeSpec(), MANIFEST)
    assert row_file(tmp_path, Shard(), 0).read_bytes() == whole


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "fsync", full)
        with pytest.raises(CorpusWriteError, match="No space left"):
            make_corpus(tmp_path, PROMPTS, FakeSpec(), MANIFEST)
    (tmp_path / "file").touch()
    with pytest.raises(CorpusWriteError, match="cannot be written"):
        make_corpus(tmp_path / "file" / "corpus", PROMPTS, FakeSpec(), MANIFEST)
    assert make_corpus(tmp_path, PROMPTS, FakeSpec(), MANIFEST).rows == ROWS


@pytest.mark.parametrize("tail", [b"", b"{", b'{"id":"b"', b"\0\0\0\0", b"\0\0\n", b"\xff\xfe", b'{"id":\n', b"\n"])
def test_tails_that_a_crash_may_leave_are_cut_off(tmp_path: Path, tail: bytes) -> None:
    path, good = tmp_path / "rows", b'{"id":"a"}\n' * 3
    for before in (b"", good):
        path.write_bytes(before + tail)
        made = RowWriter(path)
        assert path.read_bytes() == before
        made.append([b'{"id":"c"}\n'])
        made.close()
        assert path.read_bytes() == before + b'{"id":"c"}\n'


def test_a_long_unfinished_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'{"id":"a"}\n{"ids":[' + b"1," * 200_000)
    RowWriter(path).close()
    assert path.read_bytes() == b'{"id":"a"}\n'
