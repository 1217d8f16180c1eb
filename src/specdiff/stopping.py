"""When a text ends: EOS, stop ids, stop strings, the token budget, the context; token by token, as plain decoding would."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdiff.errors import InputError


class FinishReason(enum.Enum):
    """Why a text ended."""

    EOS = "eos"
    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"
    CRITERIA = "criteria"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """When a text ends.

    Attributes:
        max_new_tokens: most tokens to produce, >= 1. stop_ids: ids that end the text (kept as its last token).
        stop_strings: strings that end the text. ignore_eos: treat the model's EOS as an ordinary token.
    """

    max_new_tokens: int = 256
    stop_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError.of("max_new_tokens", expected="an integer >= 1", got=self.max_new_tokens,
                                remedy="ask for at least one token")
        if any(not s for s in self.stop_strings):
            raise InputError.of("stop_strings", expected="non-empty strings", got=list(self.stop_strings),
                                remedy="drop the empty one")


class StopCheck:
    """Fed every committed token in order; says when the text is over.

    Args:
        options: the request's. eos_ids: the target's. room: tokens the context still holds, None for no limit.
        decode: ids -> text, for stop strings.
    """

    def __init__(
        self, options: StopOptions, *, eos_ids: Sequence[int], room: int | None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if options.stop_strings and decode is None:
            raise InputError.of("stop_strings", expected="a tokenizer to decode with", got=None,
                                remedy="pass a tokenizer, or use stop_ids")
        self._options, self._decode = options, decode
        self._eos = frozenset() if options.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(options.stop_ids)
        limit = options.max_new_tokens if room is None else min(room, options.max_new_tokens)
        self._cut = FinishReason.LENGTH if limit == options.max_new_tokens else FinishReason.CONTEXT
        self.remaining = limit
        self._ids: list[int] = []

    def feed(self, token: int) -> FinishReason | None:
        """Book one token; return why the text is over, or None."""
        self.remaining -= 1
        self._ids.append(token)
        if token in self._eos:
            return FinishReason.EOS
        if token in self._stop_ids:
            return FinishReason.STOP_ID
        if self._options.stop_strings and self._decode is not None:
            text = self._decode(self._ids)
            if any(s in text for s in self._options.stop_strings):
                return FinishReason.STOP_STRING
        return self._cut if self.remaining <= 0 else None
