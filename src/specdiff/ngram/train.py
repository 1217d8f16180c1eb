"""From token ids to an ARPA file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff.errors import InputError
from specdiff.ngram.arpa import ArpaHeader, write_arpa
from specdiff.ngram.kneser_ney import Progress, estimate


def train(
    sequences: Iterable[Sequence[int]],
    path: Path,
    *,
    tokenizer_fingerprint: str,
    order: int = 3,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ArpaHeader:
    """Estimate a model by modified Kneser-Ney smoothing and write it, whole or not at all.

    Args:
        sequences: token ids of each text. path: the file, replaced if there; its folder is made.
        tokenizer_fingerprint: whose ids they are (`specdiff.corpus.identity.tokenizer_fingerprint`).
        order: longest n-gram. source: what was read, by name, for the header. progress: told of stages.

    Returns:
        What the file says of itself.

    Raises:
        InputError: there is no token, the order is below 1, or the file cannot be written.
    """
    if path.is_dir():
        raise InputError.of("out", expected="a file to write", got=str(path), remedy="name a file in that folder")
    made = estimate(sequences, order=order, progress=progress)
    header = ArpaHeader(
        order=order,
        counts=made.table.counts,
        tokenizer_fingerprint=tokenizer_fingerprint,
        sequences=made.sequences,
        tokens=made.tokens,
        discounts=tuple(d.amounts for d in made.discounts),
        fallback=tuple(n for n, d in enumerate(made.discounts, start=1) if d.fallback),
        source=source or {},
    )
    if progress is not None:
        progress("writing", 0, None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: its folder cannot be made ({error.strerror or error}); choose another") from error
    write_arpa(path, made.table, header)
    return header
