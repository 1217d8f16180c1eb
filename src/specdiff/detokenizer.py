"""Text of a growing list of token ids, decoding only a bounded suffix of it.

Detokenisers are local but not per-token: bytes of one character may come in several tokens, the first token of a text
may lose its leading space, spaces before punctuation may be cleaned away. So the last few ids are decoded together, and
the window that is decoded moves only to a place from which it demonstrably reproduces the end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a detokeniser puts where bytes do not (yet) form a character."""

_NO_ANCHOR = frozenset("'" + REPLACEMENT)

WINDOW_LIMIT = 32
"""Ids; a longer window is moved."""

WINDOW_KEEP = 12
"""Ids that a moved window tries to keep."""


class TextWindow:
    """The end of the text of all ids fed so far.

    After every `push`, ``text`` is a suffix of ``decode(all ids)`` and starts at character ``start`` of it. The cost of
    a push is one decode of a few dozen ids, more only while no shorter window reproduces the text (an unbroken run of
    ids without visible text).

    Args:
        decode: ids -> text; must be local: appending ids changes only the last few characters of the text.
        keep: characters that stay in the window after it has moved, for searches across its start.

    Attributes:
        text: end of the text. start: its offset in characters.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, keep: int = 0) -> None:
        self._decode, self._keep = decode, keep
        self._ids: list[int] = []
        self._limit = WINDOW_LIMIT
        self.text, self.start = "", 0

    def push(self, token: int) -> None:
        """Append one id."""
        self._ids.append(token)
        self.text = self._decode(self._ids)

    def shrink(self, unstable: int) -> None:
        """Move the window where it has grown long.

        Args:
            unstable: how many characters at the end may still change; they stay in the window.
        """
        if len(self._ids) <= self._limit:
            return
        kept = WINDOW_KEEP
        while kept < len(self._ids):
            for size in range(kept, min(kept + 4, len(self._ids))):  # the next boundary of a character or word
                text = self._decode(self._ids[-size:])
                stable = len(text) - unstable
                # A window must be seen to agree: it ends as the whole does, and is anchored in text.
                if stable > self._keep and self.text.endswith(text) and _has_anchor(text[:stable]):
                    self.start += len(self.text) - len(text)
                    self.text = text
                    self._ids = self._ids[-size:]
                    self._limit = size + WINDOW_LIMIT
                    return
            kept *= 2
        self._limit = len(self._ids) + WINDOW_LIMIT


def _has_anchor(text: str) -> bool:
    """Whether some character cuts the text in two independent parts.

    Not one that may be half a character, nor a space or apostrophe: clean-up takes these in pairs, from the left.
    """
    return any(c not in _NO_ANCHOR and not c.isspace() for c in text)
