"""From one tokenizer's ids to text and back, a few tokens at a time.

Tokenizers look at what is around a token, so text is never cut and encoded alone: it is decoded and encoded behind a
window of the tokens before it, and what the window itself gives is taken away. Half a character (bytes of one that comes
in several tokens) is no text yet; it decodes to U+FFFD.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_WINDOW = 16  # tokens
_TRIES = 8  # window sizes to look for a place where the text can be cut
HALF = "\ufffd"


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Tokens that stand for structure, not text (BOS, EOS, chat roles): id -> name."""
    return {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}


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
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens by their names."""
        shown = [i for i in ids if i not in self._hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def ids(self, text: str) -> list[int]:
        """Ids of a text, without `start`."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def added_text(self, before: Sequence[int], new: Sequence[int]) -> str | None:
        """What ``new`` adds to the text of ``before``; None where it changes that text."""
        window = list(before[-_WINDOW:])
        head, both = self.text(window), self.text([*window, *new])
        return both[len(head) :] if both.startswith(head) else None

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

        Where the tokenizer would join the end of ``before`` with the start of ``added``, ``added`` is encoded alone.
        """
        window = list(before[-_WINDOW:])
        head = self.text(window)
        alone, joint = self.ids(head), self.ids(head + added)
        new = joint[len(alone) :] if joint[: len(alone)] == alone else self.ids(added)
        return new if self.text([*window, *new]) == head + added else []
