"""From one tokenizer's ids to text and back, a few tokens at a time.

Tokenizers look at what is around a token, so text is not simply cut and encoded: it is decoded and encoded behind a
window of the tokens before it, and what the window itself gives is taken away. Half a character (bytes of one that
comes in several tokens) is no text yet; it decodes to U+FFFD.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_WINDOW = 16  # tokens
_TRIES = 8  # window sizes to look for a place where the text can be cut
_JOIN_NOTHING = ("\n", ".")
HALF = "\ufffd"
LONGEST_HALF = 8
"""Tokens. More that give no character are not half of one, but bytes that form none."""


class TextCodec:
    """One tokenizer.

    Args:
        tokenizer: of any kind.
        hidden: ids that give no text.

    Attributes:
        start: the ids that the tokenizer puts before every text (BOS, or none).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, hidden: Collection[int] = ()) -> None:
        self._tokenizer, self._hidden = tokenizer, frozenset(hidden)
        first = [int(i) for i in tokenizer("")["input_ids"]][:1]
        self.start = first if first == [tokenizer.bos_token_id] else []

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens by their names."""
        shown = [i for i in ids if i not in self._hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ids(self, text: str) -> list[int]:
        """Ids of a text, without `start`."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def whole_text(self, before: Sequence[int], new: Sequence[int]) -> tuple[int, str]:
        """The text that the start of ``new`` adds behind ``before``, half a character at its end left out.

        Args:
            before: ids that end with a whole character.
            new: ids that follow.

        Returns:
            How many of ``new`` were used, and their text; (0, "") where even the first few give no whole character.
        """
        window = self._window(before)
        head = self.text(window)
        for end in range(len(new), max(len(new) - LONGEST_HALF, 0), -1):
            both = self.text([*window, *new[:end]])
            # some decoders turn a whole run of bytes into U+FFFD where its end is half a character
            if both.startswith(head) and not both.endswith(HALF):
                return end, both[len(head) :]
        return 0, ""

    def appended(self, ids: Sequence[int], added: str) -> list[int] | None:
        """Ids of the text of ``ids`` followed by ``added``, the last few of ``ids`` being free to change.

        Returns:
            All ids; None where no window of the last ids stands for itself, so that all text must be encoded anew.
        """
        for size in range(_WINDOW, min(_WINDOW + _TRIES, len(ids) - len(self.start) + 1)):
            window = list(ids[-size:])
            text = self.text(window)
            if self.ids(text) == window:
                return [*ids[:-size], *self.ids(text + added)]
        return None

    def following(self, before: Sequence[int], added: str) -> list[int]:
        """Ids that put ``added`` behind ``before``, which does not change; empty where that cannot be done.

        Where the tokenizer would join the end of ``before`` with the start of ``added``, ``added`` is encoded alone, or
        behind a character that joins nothing, since some tokenizers put a space before every text.
        """
        window = self._window(before)
        head = self.text(window)
        for behind in (head, "", *_JOIN_NOTHING):
            alone, joint = self.ids(behind), self.ids(behind + added)
            new = joint[len(alone) :]
            if joint[: len(alone)] == alone and self.text([*window, *new]) == head + added:
                return new
        return []

    def _window(self, ids: Sequence[int]) -> list[int]:
        """The last few ids, from the start of a character on where there is one near."""
        windows = (list(ids[-size:]) for size in range(_WINDOW, _WINDOW + _TRIES))
        return next((w for w in windows if not self.text(w).startswith(HALF)), list(ids[-_WINDOW:]))
