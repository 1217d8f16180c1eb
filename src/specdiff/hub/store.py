"""The model store: what is there, pull, verify, remove, and from a name to a folder that is safe to load."""

from __future__ import annotations

import enum
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdiff.errors import CheckpointError, DownloadError, InputError
from specdiff.hub.catalog import CATALOG, CatalogEntry, find_entry, unknown_model
from specdiff.hub.converter import Converter, convert_in_process
from specdiff.hub.folders import Folders, default_root, discard, folder_bytes, publish
from specdiff.hub.manifest import (
    FileProblem,
    Manifest,
    check_hashes,
    check_recorded,
    check_sizes,
    read_manifest,
    write_manifest,
)
from specdiff.hub.progress import Progress, ProgressCallback, ignore
from specdiff.hub.safety import check_folder
from specdiff.hub.wheels import PipRunner, assemble, count_staged, run_pip

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SCRATCH = ("pip-*", "built-*", "removed-*", "*.part")  # what an interrupted pull or removal leaves behind


class State(enum.Enum):
    """Of a model in the store."""

    ABSENT = "absent"
    PARTIAL = "partial"
    """A pull was interrupted; the next continues it."""
    READY = "ready"
    DAMAGED = "damaged"
    """Not as the manifest says, or made from another file than the catalog now names; a pull replaces it."""


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """One line of ``specdiff models list``.

    Attributes:
        name: catalog name.
        title, licence, label, note: see `CatalogEntry`.
        test_only: see `CatalogEntry`.
        state: see `State`.
        reason: why it is partial or damaged, "" otherwise.
        folder: where the model is, or will be.
        stored_bytes: on disk now, staging included.
        download_bytes: of the whole download.
        fingerprint: of the stored copy, "" unless ready.
    """

    name: str
    title: str
    licence: str
    label: str
    note: str
    test_only: bool
    state: State
    reason: str
    folder: Path
    stored_bytes: int
    download_bytes: int
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"state": self.state.value, "folder": str(self.folder)}


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a model named by the user is loaded from.

    Attributes:
        source: what to hand to ``from_pretrained``: a folder, or a hub id.
        folder: the checked local folder; None for a hub id, which nothing has checked yet.
        name: what the user wrote.
        fingerprint: of a stored copy; "" elsewhere, where `model_fingerprint` has to read the weights.
        label: how results with this copy must be labelled, "" where nothing is known.
    """

    source: str
    folder: Path | None
    name: str
    fingerprint: str = ""
    label: str = ""


class ModelStore:
    """The models under one root folder. Safe to use from several processes at once.

    Args:
        root: the folder; by default ``$SPECDIFF_HOME`` or the platform's cache folder.
        catalog: what can be pulled.
        run: how pip is run.
        convert: how a GGUF file is converted.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        catalog: Mapping[str, CatalogEntry] = CATALOG,
        run: PipRunner = run_pip,
        convert: Converter = convert_in_process,
    ) -> None:
        self.folders = Folders((root or default_root()).absolute())
        self._catalog = catalog
        self._run = run
        self._convert = convert

    @property
    def root(self) -> Path:
        """The root folder; it need not exist."""
        return self.folders.root

    def list(self) -> tuple[ModelStatus, ...]:
        """Status of every model of the catalog, in its order. Takes no time: sizes are compared, not hashes."""
        return tuple(self.status(name) for name in self._catalog)

    def status(self, name: str) -> ModelStatus:
        """Status of one model.

        Raises:
            InputError: no such name.
        """
        entry = find_entry(name, self._catalog)
        folder, staging = self.folders.model(name), self.folders.staging(name)
        state, reason, fingerprint = State.ABSENT, "", ""
        if folder.exists():
            try:
                fingerprint = self._installed(entry).fingerprint
                state = State.READY
            except CheckpointError as error:
                state, reason = State.DAMAGED, str(error)
        elif count := count_staged(entry, staging):
            state, reason = State.PARTIAL, f"{count} of {len(entry.parts)} parts fetched"
        return ModelStatus(
            name=name,
            title=entry.title,
            licence=entry.licence,
            label=entry.label,
            note=entry.note,
            test_only=entry.test_only,
            state=state,
            reason=reason,
            folder=folder,
            stored_bytes=folder_bytes(folder) + folder_bytes(staging),
            download_bytes=entry.download_size,
            fingerprint=fingerprint,
        )

    def show(self, name: str) -> dict[str, Any]:
        """Everything known of a model, as plain data: its status, its wheels, its manifest where it is stored.

        Raises:
            InputError: no such name.
        """
        status = self.status(name)
        entry = find_entry(name, self._catalog)
        manifest = read_manifest(status.folder).to_json() if status.state is State.READY else None
        wheels = [{"requirement": part.requirement, "sha256": part.sha256, "size": part.size} for part in entry.parts]
        return status.to_json() | {"wheels": wheels, "gguf_sha256": entry.gguf_sha256, "manifest": manifest}

    def pull(self, name: str, *, force: bool = False, progress: ProgressCallback = ignore) -> Path:
        """Have a model in the store, and return its folder. Where it is already there, nothing is done.

        Args:
            name: catalog name. Naming a ``test_only`` model here is what it takes to pull it.
            force: replace a stored copy.
            progress: called often, from this thread.

        Raises:
            InputError: no such name, or a root that cannot be written.
            DownloadError: fetching failed; what is complete is kept for the next attempt.
            CheckpointError: conversion failed; the download is kept.
        """
        entry = find_entry(name, self._catalog)
        target = self.folders.model(name)
        if not force and self._is_ready(entry):
            return target
        with self.folders.locked(name, progress):
            if not force and self._is_ready(entry):  # another process pulled it meanwhile
                return target
            staging = self.folders.staging(name)
            _clean(staging)
            self._require_space(entry, staging)
            try:
                self._build(entry, staging, target, progress)
                shutil.rmtree(staging)
            except DownloadError:
                raise
            except OSError as error:  # disk full, quota, a disk that went away
                raise DownloadError(
                    f"{error.filename or staging}: cannot be written ({error.strerror or error}); make room or set "
                    "SPECDIFF_HOME to another disk, then run the pull again, what is complete is kept"
                ) from error
        return target

    def verify(self, name: str, *, progress: ProgressCallback = ignore) -> tuple[FileProblem, ...]:
        """Hash every file of a stored model again, and check its structure.

        Returns:
            What is wrong; empty where all is well.

        Raises:
            InputError: no such name, or not in the store.
            CheckpointError: its manifest is unreadable.
        """
        folder = self._stored(name)
        problems = check_hashes(folder, read_manifest(folder), progress)
        if not problems:
            check_folder(folder)
        return problems

    def remove(self, name: str) -> int:
        """Delete a model, and what an interrupted pull of it left.

        Returns:
            Bytes freed; 0 where there was nothing.

        Raises:
            InputError: no such name, or a root that cannot be written.
        """
        find_entry(name, self._catalog)
        folder, staging = self.folders.model(name), self.folders.staging(name)
        if not folder.exists() and not staging.exists():
            return 0
        with self.folders.locked(name, ignore):
            freed = folder_bytes(folder) + folder_bytes(staging)
            if folder.exists():
                discard(folder, staging)
            shutil.rmtree(staging)
        return freed

    def resolve(
        self,
        name_or_path: str | Path,
        *,
        pull: bool = False,
        allow_remote_code: bool = False,
        progress: ProgressCallback = ignore,
    ) -> Location:
        """Turn what the user calls a model into what can be loaded; a local folder has passed `check_folder`.

        A catalog name means the store (write ``./name`` for a folder of that name), an existing folder itself, and
        ``org/name`` a hub id, which is passed through. Files of a stored model, or of a folder with a manifest, are
        hashed, so that one that was changed is never taken for the original.

        Args:
            name_or_path: the user's word.
            pull: fetch a catalog model that is not in the store, unless it is ``test_only``.
            allow_remote_code: see `check_folder`.
            progress: of the pull.

        Raises:
            InputError: it means none of these, or it would have to be pulled first.
            DownloadError: the pull failed.
            CheckpointError: the folder is not safe and sound.
        """
        name = str(name_or_path)
        if name in self._catalog:
            return self._resolve_stored(self._catalog[name], pull=pull, progress=progress)
        folder, is_folder, exists = _look(name)
        if is_folder:
            check_folder(folder, allow_remote_code=allow_remote_code)
            check_recorded(folder)
            return Location(source=str(folder), folder=folder, name=name)
        if exists:
            raise InputError.of("model", expected="a folder", got=name, remedy="pass the folder that holds this file")
        if isinstance(name_or_path, str) and _HUB_ID.fullmatch(name):
            return Location(source=name, folder=None, name=name)
        raise unknown_model(name, self._catalog)

    def _resolve_stored(self, entry: CatalogEntry, *, pull: bool, progress: ProgressCallback) -> Location:
        folder = self.folders.model(entry.name)
        if not folder.exists():
            if not pull or entry.test_only:
                raise _not_stored(entry)
            self.pull(entry.name, progress=progress)
        manifest = self._installed(entry)
        problems = check_hashes(folder, manifest)  # a third of a second for the default target
        if problems:
            first = problems[0]
            raise CheckpointError(
                f"{first.file} of {entry.name}: expected {first.expected}, got {first.got}; the stored model was "
                f"changed or damaged: specdiff models pull --force {entry.name}"
            )
        check_folder(folder)
        return Location(
            source=str(folder),
            folder=folder,
            name=entry.name,
            fingerprint=manifest.fingerprint,
            label=manifest.label,
        )

    def _build(self, entry: CatalogEntry, staging: Path, target: Path, progress: ProgressCallback) -> None:
        gguf, licence = assemble(entry, staging, run=self._run, progress=progress)
        built = Path(tempfile.mkdtemp(prefix="built-", dir=staging))
        progress(Progress(stage="convert", item=entry.name, done=0, total=1))
        versions = self._convert(gguf, built, entry)
        progress(Progress(stage="convert", item=entry.name, done=1, total=1))
        if licence is not None:
            (built / "LICENSE").write_text(licence, encoding="utf-8")
        for path in (built, *built.rglob("*")):  # safetensors and mkdtemp write for the owner only
            path.chmod(0o755 if path.is_dir() else 0o644)
        provenance = {
            "gguf": entry.gguf,
            "gguf_sha256": entry.gguf_sha256,
            "wheels": [{"requirement": part.requirement, "sha256": part.sha256} for part in entry.parts],
            "converted_with": versions,
        }
        write_manifest(
            built,
            name=entry.name,
            title=entry.title,
            licence=entry.licence,
            label=entry.label,
            provenance=provenance,
            progress=progress,
        )
        publish(built, target, staging)

    def _installed(self, entry: CatalogEntry) -> Manifest:
        """The manifest of a stored model whose files have the right sizes and source.

        Raises:
            CheckpointError: they have not; the message says what to do.
        """
        folder = self.folders.model(entry.name)
        remedy = f"run `specdiff models pull {entry.name}` to replace it"
        manifest = read_manifest(folder)
        if problems := check_sizes(folder, manifest):
            first = problems[0]
            raise CheckpointError(f"{folder / first.file}: expected {first.expected}, got {first.got}; {remedy}")
        if (source := manifest.provenance.get("gguf_sha256")) != entry.gguf_sha256:
            raise CheckpointError(
                f"{folder}: made from another file than the catalog names (expected sha256 {entry.gguf_sha256}, got "
                f"{source}); {remedy}"
            )
        return manifest

    def _is_ready(self, entry: CatalogEntry) -> bool:
        try:
            self._installed(entry)
        except CheckpointError:
            return False
        return True

    def _stored(self, name: str) -> Path:
        entry = find_entry(name, self._catalog)
        folder = self.folders.model(name)
        if not folder.exists():
            raise _not_stored(entry)
        return folder

    def _require_space(self, entry: CatalogEntry, staging: Path) -> None:
        # Most is needed while the wheels and the GGUF, then the GGUF and the converted folder, are there together.
        peak = entry.gguf_size + max(entry.download_size, entry.bf16_size) - folder_bytes(staging)
        if (free := self.folders.free_bytes()) < peak:
            raise DownloadError(
                f"{entry.name}: expected {peak / 1e9:.1f} GB free below {self.root}, got {free / 1e9:.1f} GB; free "
                "some space or set SPECDIFF_HOME to a larger disk"
            )


def _look(name: str) -> tuple[Path, bool, bool]:
    """The path that ``name`` may mean, whether it is a folder, and whether it exists at all."""
    try:
        folder = Path(name).expanduser()
        return folder, bool(name) and folder.is_dir(), bool(name) and folder.exists()
    except (OSError, RuntimeError, ValueError):  # too long for a path, ~nobody, a NUL byte
        return Path(name), False, False


def _not_stored(entry: CatalogEntry) -> InputError:
    remedy = f"run `specdiff models pull {entry.name}` first"
    if entry.note:
        remedy += f" ({entry.note})"
    return InputError.of("model", expected="a model in the store", got=entry.name, remedy=remedy)


def _clean(staging: Path) -> None:
    for pattern in _SCRATCH:
        for path in staging.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
