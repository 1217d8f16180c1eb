"""The record beside a stored model: what each file must hash to, where it came from, under which licence."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdiff.errors import CheckpointError
from specdiff.files import write_text
from specdiff.hub.fingerprint import model_fingerprint, sha256_file
from specdiff.hub.progress import Progress, ProgressCallback, ignore
from specdiff.hub.safety import read_json

MANIFEST = "specdiff.json"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a model: bytes and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the store knows of a model.

    Attributes:
        name, title, licence: as in the catalog.
        label: how results with this copy must be labelled.
        fingerprint: of the folder, see `specdiff.hub.fingerprint`.
        created: UTC, ISO 8601.
        provenance: the source file with its hash, the wheels with theirs, and the versions that converted it.
        files: every file of the folder but the manifest.
    """

    name: str
    title: str
    licence: str
    label: str
    fingerprint: str
    created: str
    provenance: dict[str, Any]
    files: dict[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        """Plain data, as stored."""
        return {"schema": _SCHEMA, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class FileProblem:
    """A file that is not as recorded.

    Attributes:
        file: its name in the model folder.
        expected: what the manifest says.
        got: what was found.
    """

    file: str
    expected: str
    got: str


def write_manifest(
    folder: Path,
    *,
    name: str,
    title: str,
    licence: str,
    label: str,
    provenance: dict[str, Any],
    progress: ProgressCallback = ignore,
) -> Manifest:
    """Hash every file of ``folder`` and write the manifest into it."""
    hashes = _hash_all(folder, progress)
    manifest = Manifest(
        name=name,
        title=title,
        licence=licence,
        label=label,
        fingerprint=model_fingerprint(folder, hashes),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        provenance=provenance,
        files={file: FileRecord(size=(folder / file).stat().st_size, sha256=sha256) for file, sha256 in hashes.items()},
    )
    write_text(folder / MANIFEST, json.dumps(manifest.to_json(), indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a stored model.

    Raises:
        CheckpointError: there is none, or it is not a manifest.
    """
    data = read_json(folder / MANIFEST)
    try:
        if data.pop("schema") != _SCHEMA:
            raise CheckpointError(f"{folder / MANIFEST}: written by another version of specdiff; pull the model again")
        files = {file: FileRecord(**record) for file, record in data.pop("files").items()}
        manifest = Manifest(files=files, **data)
        if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
            raise ValueError("a file lies outside the folder")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: not a manifest ({error}); pull the model again") from error
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> tuple[FileProblem, ...]:
    """Compare presence and size only: takes no time, finds what a crash leaves behind."""
    problems: list[FileProblem] = []
    for file, record in manifest.files.items():
        path = folder / file
        if not path.is_file():
            problems.append(FileProblem(file=file, expected=f"{record.size} bytes", got="no such file"))
        elif (size := path.stat().st_size) != record.size:
            problems.append(FileProblem(file=file, expected=f"{record.size} bytes", got=f"{size} bytes"))
    return tuple(problems)


def check_hashes(folder: Path, manifest: Manifest, progress: ProgressCallback = ignore) -> tuple[FileProblem, ...]:
    """Hash every file again; files that the manifest does not know are problems too."""
    problems = {problem.file: problem for problem in check_sizes(folder, manifest)}
    for file, sha256 in _hash_all(folder, progress).items():
        record = manifest.files.get(file)
        if record is None:
            problems[file] = FileProblem(file=file, expected="no such file", got="a file the manifest does not know")
        elif file not in problems and record.sha256 != sha256:
            problems[file] = FileProblem(file=file, expected=f"sha256 {record.sha256}", got=f"sha256 {sha256}")
    return tuple(problems[file] for file in sorted(problems))


def check_recorded(folder: Path, *, required: bool = False) -> None:
    """Refuse a folder that is not as its manifest says: a flipped bit in a weight is met here, not as worse text.

    Args:
        folder: of any model; without a manifest nothing is known of it, and nothing checked.
        required: whether it must have one.

    Raises:
        CheckpointError: a file was changed, is missing or new; or the manifest is unreadable or, if required, missing.
    """
    if not required and not (folder / MANIFEST).is_file():
        return
    problems = check_hashes(folder, read_manifest(folder))
    if problems:
        first = problems[0]
        raise CheckpointError(
            f"{folder / first.file}: expected {first.expected}, got {first.got}; the folder is not as its {MANIFEST} "
            "says: fetch it again, or delete that file if the change is meant"
        )


def _hash_all(folder: Path, progress: ProgressCallback) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    total = sum(path.stat().st_size for path in files)
    done = 0
    hashes: dict[str, str] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()

        def advance(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            progress(Progress(stage="hash", item=name, done=done, total=total))

        hashes[name] = sha256_file(path, advance)
    return hashes
