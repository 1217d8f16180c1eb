"""Scores by KenLM (https://github.com/kpu/kenlm), for models too large for dictionaries."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff.errors import CheckpointError, InputError
from specdiff.ngram.arpa import read_header
from specdiff.ngram.base import BOS, EOS, UNK

_LN10 = math.log(10.0)
_CACHED = 1 << 14  # contexts


class _Words(dict[int, str]):
    """The word of each id, made once."""

    def __missing__(self, token: int) -> str:
        word = self[token] = str(token)
        return word


class KenlmScorer:
    """Evaluates an ARPA file, or KenLM's binary form of one, in float32.

    KenLM's Python module takes words and a state object; states of the last contexts and words are kept, so that a
    candidate costs one call of it: 0.7 microseconds for an answer's text under a model of 190,000 3-grams and shorter
    (two slow cores, shared). Not for several threads at once.

    Args:
        path: the file. name: used in records.
        tokenizer_fingerprint: the tokenizer whose ids it must hold, None = any (a binary file does not say).

    Raises:
        InputError: KenLM is not installed. ArpaError: the file is no ARPA file, where a fingerprint is asked for.
        PairingError: it holds ids of another tokenizer. CheckpointError: KenLM cannot load it; it loads no model of
            order 1, and none above the order it was built for (6 unless ``MAX_ORDER`` said otherwise).
    """

    def __init__(self, path: Path, *, tokenizer_fingerprint: str | None = None, name: str = "ngram-kenlm") -> None:
        kenlm = _module()
        if tokenizer_fingerprint is not None:
            read_header(path, tokenizer_fingerprint=tokenizer_fingerprint)
        config = kenlm.Config()
        config.show_progress, config.arpa_complain = False, kenlm.ARPALoadComplain.NONE
        try:
            self._model: Any = kenlm.Model(str(path), config)
        except OSError as error:
            raise CheckpointError(
                f"{path}: KenLM cannot load it ({error}); give a model of order 2 to 6, or use `MemoryScorer`"
            ) from error
        self.order, self.name = int(self._model.order), name
        self._words = _Words({BOS: "<s>", EOS: "</s>", UNK: "<unk>"})
        self._new_state: Any = kenlm.State
        self._scratch: Any = kenlm.State()
        self._states: dict[tuple[int, ...], Any] = {}

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `specdiff.ngram.base.NgramScorer.log_probs`."""
        key = tuple(context[1 - self.order :])
        state = self._states.get(key)
        if state is None:
            state = self._state(key)
        score, words, out = self._model.BaseScore, self._words, self._scratch
        return [score(state, words[token], out) * _LN10 for token in tokens]

    def _state(self, context: tuple[int, ...]) -> Any:
        if len(self._states) >= _CACHED:
            self._states.clear()
        state, following = self._new_state(), self._new_state()
        rest = context
        if context[:1] == (BOS,):
            self._model.BeginSentenceWrite(state)
            rest = context[1:]
        else:
            self._model.NullContextWrite(state)
        for token in rest:
            self._model.BaseScore(state, self._words[token], following)
            state, following = following, state
        self._states[context] = state
        return state


def installed() -> bool:
    """Whether KenLM's Python module is there."""
    try:
        importlib.import_module("kenlm")
    except ImportError:
        return False
    return True


def _module() -> Any:
    try:
        return importlib.import_module("kenlm")
    except ImportError as error:
        raise InputError.of(
            "engine",
            expected="the package `kenlm`",
            got=str(error),
            remedy="pip install 'specdiff[ngram]', or use `MemoryScorer`",
        ) from error
