"""Streaming text: ids in, text out, in pieces whose concatenation is exactly the full decode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from specdiff.detokenizer import REPLACEMENT, TextWindow
from specdiff.stopping import checked_stop_strings, find_stop

_LONGEST_CHARACTER = 4  # bytes in UTF-8; an unfinished character shows as at most one U+FFFD fewer
# What may stand after a space that the next token's text makes clean-up remove (" n" + "'t" -> "n't").
_CLEANED = ("", "'", "n", "n'", "'v", "'r")
_CLEAN_UP_REACH = 16


class Tokenizer(Protocol):
    """What is needed of a ``transformers`` tokenizer."""

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        """Return the text of ids."""
        ...


class TextStream:
    """Incremental detokeniser of one continuation.

    The pieces that `push` and `finish` return add up to ``tokenizer.decode(ids, ...)`` with the same options, cut at
    the first stop string. A piece never contains a U+FFFD that the whole text does not have, nor text that may turn out
    to begin a stop string, nor text that later tokens may change: all of these are held back until they are certain.

    The result does not depend on how the ids are grouped into calls: the stop string that counts is the first one
    contained in the text after any single token, as in `specdiff.stopping.StopCheck`.

    Args:
        tokenizer: any tokenizer of ``transformers``, or another object with such a ``decode``.
        skip_special_tokens, clean_up_tokenization_spaces: as for ``tokenizer.decode``.
        stop_strings: where the text ends. include_stop: whether it ends behind the stop string.

    Attributes:
        stopped: the stop string that ended the text, None so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        options: dict[str, object] = {"skip_special_tokens": skip_special_tokens}
        if clean_up_tokenization_spaces is None:
            self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        else:
            self._cleans = options["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
        self._stops, self._include_stop = checked_stop_strings(stop_strings), include_stop
        self._longest_stop = max(map(len, self._stops), default=0)
        self._window = TextWindow(lambda ids: tokenizer.decode(ids, **options), keep=self._longest_stop)
        self._byte_ids = byte_fallback_ids(tokenizer)
        self._in_bytes = False  # whether the text ends in byte tokens
        self._emitted = 0  # characters handed out
        self._stable = 0  # characters that no further token can change
        self.stopped: str | None = None

    def push(self, ids: int | Iterable[int]) -> str:
        """Append ids; return the text that is now certain ("" once a stop string has ended it)."""
        return "".join(self._push(token) for token in ([ids] if isinstance(ids, int) else map(int, ids)))

    def finish(self) -> str:
        """Return the text that was held back; the stream is over."""
        return "" if self.stopped is not None else self._emit(self._end)

    @property
    def _end(self) -> int:
        return self._window.start + len(self._window.text)

    def _push(self, token: int) -> str:
        if self.stopped is not None:
            return ""
        window, before = self._window, self._window.text
        window.push(token)
        if self._stops and (stop := find_stop(window.text, self._stops)) is not None:
            at, self.stopped = stop
            return self._emit(window.start + at + (len(self.stopped) if self._include_stop else 0))
        # One bad byte turns a whole run of byte tokens into U+FFFD; tokens without text do not end the run.
        self._in_bytes = token in self._byte_ids or (self._in_bytes and window.text == before)
        if not self._in_bytes:
            self._stable = max(self._stable, self._end - unstable_length(window.text, cleans=self._cleans))
        piece = self._emit(self._stable - self._possible_stop(window.text[: self._stable - window.start]))
        window.shrink(self._end - self._stable)
        return piece

    def _emit(self, end: int) -> str:
        piece = self._window.text[self._emitted - self._window.start : max(0, end - self._window.start)]
        self._emitted += len(piece)
        return piece

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string starts."""
        for size in range(min(self._longest_stop - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stops):
                return size
        return 0


def unstable_length(text: str, *, cleans: bool) -> int:
    """How many characters at the end of a decoded text the next token may still change.

    Args:
        text: the text so far.
        cleans: whether the tokenizer removes spaces before punctuation.
    """
    bare = text.rstrip(REPLACEMENT)
    unfinished = min(len(text) - len(bare), _LONGEST_CHARACTER - 1)
    if unfinished or not cleans:
        return unfinished
    reach = text[-_CLEAN_UP_REACH:]
    spaces = [i for i, c in enumerate(reach) if c == " " and reach[i:].replace(" ", "") in _CLEANED]
    if spaces:
        return len(reach) - spaces[0]
    return int(text.endswith("'"))  # " ' " became "'", which "," would undo: " ' ," becomes " ',"


def byte_fallback_ids(tokenizer: object) -> frozenset[int]:
    """Ids of the 256 byte tokens (``<0x0A>``) of SentencePiece-like vocabularies; empty where there are none."""
    to_ids = getattr(tokenizer, "convert_tokens_to_ids", None)
    to_tokens = getattr(tokenizer, "convert_ids_to_tokens", None)
    if to_ids is None or to_tokens is None:
        return frozenset()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = [i for i in to_ids(names) if isinstance(i, int)]
    return frozenset(i for i, token in zip(ids, to_tokens(ids), strict=True) if token in names)
