"""Corpora come back: every line checked, and none from another target or tokenizer by accident."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specdiff.corpus.folder import row_files
from specdiff.corpus.manifest import MANIFEST, CorpusManifest, read_manifest
from specdiff.corpus.problems import Broken, BrokenRowError, CorpusError
from specdiff.corpus.row import CorpusRow, parse_line


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows and where they came from.

    Attributes:
        rows: in the order of paths, files and lines.
        manifests: of each path that has one.
    """

    rows: tuple[CorpusRow, ...]
    manifests: tuple[CorpusManifest, ...]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Row files under one manifest.

    Attributes:
        files: to read. manifest: that they belong to, None for a file without one.
    """

    files: tuple[Path, ...]
    manifest: CorpusManifest | None


def read_corpus(
    paths: str | Path | Iterable[str | Path],
    *,
    target_fingerprint: str | None = None,
    tokenizer_fingerprint: str | None = None,
    allow_other_model: bool = False,
    vocab_size: int | None = None,
) -> Corpus:
    """Read rows, refusing broken ones and those of another target.

    Args:
        paths: folders of corpora, or row files; one or several.
        target_fingerprint: the target the rows must come from: of its weights (``sha256:...``, see
            `specdiff.hub.model_fingerprint`) or of its tables (`specdiff.models.layer_cut.target_fingerprint`).
        tokenizer_fingerprint: the tokenizer whose ids they must hold (`specdiff.corpus.identity`).
        allow_other_model: take rows of another model with the same tokenizer; `tokenizer_fingerprint` is needed then.
        vocab_size: ids must be below it, where no manifest says so.

    Raises:
        BrokenRowError: a line is not a row, naming file and line. CorpusError: another target or tokenizer, a file
            without a manifest where a fingerprint is asked for, or no row at all.
    """
    if allow_other_model and tokenizer_fingerprint is None:
        raise CorpusError("allow_other_model: expected a tokenizer_fingerprint beside it, got none; give it")
    sources = find_sources(paths)
    for source in sources:
        _check_identity(source, target_fingerprint, tokenizer_fingerprint, allow_other_model=allow_other_model)
    rows: list[CorpusRow] = []
    for found in scan(sources, vocab_size=vocab_size):
        if isinstance(found, BrokenRowError):
            raise found
        rows.append(found)
    if not rows:
        raise CorpusError(f"corpus: expected at least one row, got none in {_named(sources, paths)}; make it first")
    return Corpus(rows=tuple(rows), manifests=tuple(s.manifest for s in sources if s.manifest is not None))


def find_sources(paths: str | Path | Iterable[str | Path]) -> list[Source]:
    """Find row files and manifests.

    Raises:
        CorpusError: a path is neither a corpus nor a file, or a manifest is damaged.
    """
    sources: list[Source] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if path.is_dir():
            sources.append(Source(files=tuple(row_files(path)), manifest=read_manifest(path)))
        elif path.is_file():
            beside = (path.parent / MANIFEST).is_file()
            sources.append(Source(files=(path,), manifest=read_manifest(path.parent) if beside else None))
        else:
            raise CorpusError(f"{path}: expected the folder of a corpus or a file of rows, got neither; check the path")
    if not sources:
        raise CorpusError("corpus: expected at least one path, got none; name a folder")
    return sources


def scan(sources: Iterable[Source], *, vocab_size: int | None = None) -> Iterator[CorpusRow | BrokenRowError]:
    """Every line of every file, as a row or as what is wrong with it. A key that came before is wrong."""
    seen: dict[tuple[str, int], tuple[Path, int]] = {}
    for source in sources:
        target = source.manifest.target if source.manifest else None
        size, eos = (target.vocab_size, target.eos_ids) if target else (vocab_size, ())
        for path in source.files:
            try:
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        try:
                            row = parse_line(line, path, number, vocab_size=size, eos_ids=eos)
                        except BrokenRowError as error:
                            yield error
                            continue
                        if row.key in seen:
                            other, at = seen[row.key]
                            message = f"{row.id!r} sample {row.sample} is also {other}, line {at}; remove one"
                            yield BrokenRowError(path, number, Broken.DUPLICATE, message)
                        else:
                            seen[row.key] = (path, number)
                            yield row
            except OSError as error:
                yield BrokenRowError(path, 0, Broken.UNREADABLE, str(error.strerror or error))


def _check_identity(source: Source, target: str | None, tokenizer: str | None, *, allow_other_model: bool) -> None:
    if target is None and tokenizer is None:
        return
    where = source.files[0].parent if source.files else "corpus"
    if source.manifest is None:
        raise CorpusError(
            f"{source.files[0]}: no {MANIFEST} beside it says which target its rows come from; restore it"
        )
    made_by = source.manifest.target
    if tokenizer is not None and made_by.tokenizer_fingerprint != tokenizer:
        raise CorpusError(
            f"{where}: rows of another tokenizer: expected {tokenizer}, got {made_by.tokenizer_fingerprint} "
            f"({made_by.name}); make a corpus with this target"
        )
    if target is None or allow_other_model:
        return
    got = made_by.weights_fingerprint if target.startswith("sha256:") else made_by.tables_fingerprint
    if got != target:
        raise CorpusError(
            f"{where}: rows of another model: expected {target}, got {got or 'an unknown one'} ({made_by.name}); make "
            "a corpus with this target, or say allow_other_model=True if the tokenizer is the same"
        )


def _named(sources: list[Source], paths: object) -> str:
    files = [str(path) for source in sources for path in source.files]
    return ", ".join(files[:3]) or str(paths)
