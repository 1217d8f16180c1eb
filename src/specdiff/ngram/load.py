"""From a file to a scorer."""

from __future__ import annotations

from pathlib import Path

from specdiff.errors import InputError
from specdiff.ngram.arpa import read_arpa, read_header
from specdiff.ngram.base import NgramScorer
from specdiff.ngram.kenlm_scorer import KenlmScorer, installed
from specdiff.ngram.memory import MemoryScorer

_KENLM_ORDERS = range(2, 7)  # of the package as it comes


def load_scorer(path: str | Path, *, tokenizer_fingerprint: str | None = None, engine: str = "auto") -> NgramScorer:
    """Load an ARPA file.

    Args:
        path: the file. tokenizer_fingerprint: the tokenizer whose ids it must hold, None = any.
        engine: ``kenlm``, ``memory``, or ``auto``: KenLM where it is installed and takes the model's order.

    Raises:
        InputError: the engine is none of these, or KenLM is asked for and not installed. ArpaError: the file is not
            sound. PairingError: it holds ids of another tokenizer. CheckpointError: KenLM cannot load it.
    """
    path = Path(path)
    if engine not in ("auto", "kenlm", "memory"):
        raise InputError.of("engine", expected="auto, kenlm or memory", got=engine, remedy="auto is usual")
    if engine == "auto":
        engine = "kenlm" if installed() and read_header(path).order in _KENLM_ORDERS else "memory"
    if engine == "kenlm":
        return KenlmScorer(path, tokenizer_fingerprint=tokenizer_fingerprint)
    return MemoryScorer(read_arpa(path, tokenizer_fingerprint=tokenizer_fingerprint)[1])
