"""Where the store lives and how its files are written: root, layout, lock, writes that are whole or absent.

::

    <root>/models/<name>/     a complete model; appears by one rename
    <root>/staging/<name>/    verified wheels and the GGUF of a pull under way, its scratch folders
    <root>/locks/<name>.lock  held by whoever changes the model
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from specdiff.errors import InputError
from specdiff.hub.progress import Progress, ProgressCallback


def default_root() -> Path:
    """``$SPECDIFF_HOME``, or ``specdiff`` in the platform's cache folder.

    Raises:
        InputError: neither the variable is set nor a home folder known.
    """
    if chosen := os.environ.get("SPECDIFF_HOME"):
        return Path(chosen).expanduser()
    try:
        if sys.platform == "darwin":
            cache = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise InputError.of(
            "SPECDIFF_HOME", expected="a folder for models", got="", remedy="set it, no home folder is known"
        ) from error
    return cache / "specdiff"


class Folders:
    """The paths under one root. Making an instance touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"

    def model(self, name: str) -> Path:
        """Folder of a complete model."""
        return self.models / name

    def staging(self, name: str) -> Path:
        """Folder of a pull under way."""
        return self.root / "staging" / name

    def prepare(self, name: str) -> Path:
        """Create what a pull of ``name`` needs and return its staging folder.

        Raises:
            InputError: the root cannot be written.
        """
        try:
            self.models.mkdir(parents=True, exist_ok=True)
            (self.root / "locks").mkdir(exist_ok=True)
            self.staging(name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.staging(name)):
                pass
        except OSError as error:
            raise InputError.of(
                "SPECDIFF_HOME",
                expected="a folder that can be written",
                got=str(self.root),
                remedy=f"set SPECDIFF_HOME to such a folder ({error.strerror or error})",
            ) from error
        return self.staging(name)

    @contextlib.contextmanager
    def locked(self, name: str, progress: ProgressCallback) -> Iterator[None]:
        """Hold the lock of ``name``; wait for it as long as another process holds it.

        Raises:
            InputError: the root cannot be written.
        """
        self.prepare(name)
        lock = filelock.FileLock(self.root / "locks" / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress(Progress(stage="wait", item=name, done=0, total=1))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def free_bytes(self) -> int:
        """Free bytes of the disk that holds the root (or will)."""
        folder = self.root
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free


def publish(built: Path, target: Path, trash: Path) -> None:
    """Move the complete folder ``built`` to ``target``; what was there before is moved to ``trash`` and deleted."""
    if target.exists():
        discard(target, trash)
    built.rename(target)


def discard(folder: Path, trash: Path) -> None:
    """Make a folder vanish by one rename, then delete it at leisure."""
    doomed = Path(tempfile.mkdtemp(prefix="removed-", dir=trash))
    folder.rename(doomed / folder.name)
    shutil.rmtree(doomed)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder; 0 where there is none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may be deleting it
            total += path.lstat().st_size if path.is_file() else 0
    return total
