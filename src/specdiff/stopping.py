"""When a text ends: EOS, stop ids, stop strings, criteria, time, the token budget, the context.

Token by token, as plain decoding would: the text ends with the first token after which a reason holds, that token is
counted, and whatever a draft had beyond it never existed. Where several reasons hold after the same token, the first in
the order of `FinishReason` is reported.

* A stop string ends the text with the first token after which the decoded continuation contains it. That token is part
  of the ids and of the count, as in plain decoding; the TEXT is cut before the stop string (`cut_at_stop`), or behind
  it with ``include_stop``.
* ``min_new_tokens`` is a matter of the law (it bans EOS, see `SamplingOptions`), as in ``transformers``: it delays
  neither stop ids nor stop strings.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteria

from specdiff.checking import flag, integer, real, sequence, token_ids
from specdiff.detokenizer import TextWindow
from specdiff.errors import InputError, SpecdiffError

_UNSTABLE = 16  # characters at the end of a text that a detokeniser may still change


class FinishReason(enum.Enum):
    """Why a text ended."""

    EOS = "eos"
    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    CRITERIA = "criteria"
    TIME = "time"
    LENGTH = "length"
    CONTEXT = "context"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """When a text ends.

    Attributes:
        max_new_tokens: most tokens to produce, >= 1. stop_ids: ids that end the text (kept as its last token).
        stop_strings: strings that end the text (a single string is one). include_stop: keep it in the text.
            Decoding without special tokens cannot find one in the text: name it in ``stop_ids``.
        ignore_eos: treat the model's EOS as an ordinary token.
        criteria: ``transformers`` stopping criteria, called after every token with ids [1, L] and ``scores=None``;
            any that holds ends the text.
        max_time: seconds, prefill included, after which the text ends with the round in progress (at least one).
    """

    max_new_tokens: int = 256
    stop_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    criteria: Sequence[StoppingCriteria] = ()
    max_time: float | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_new_tokens", integer("max_new_tokens", self.max_new_tokens, 1, remedy="ask for at least one token"))
        put("stop_ids", token_ids("stop_ids", self.stop_ids, remedy="pass a list of ids, or strings as stop_strings"))
        put("stop_strings", checked_stop_strings(self.stop_strings))
        for name in ("include_stop", "ignore_eos"):
            flag(name, getattr(self, name), remedy="pass a bool")
        criteria = sequence("criteria", self.criteria, expected="a sequence of stopping criteria", remedy="pass a list")
        if not all(callable(c) for c in criteria):
            raise InputError.of(
                "criteria",
                expected="callables (input_ids, scores) -> bool",
                got=criteria,
                remedy="pass instances of transformers.StoppingCriteria",
            )
        put("criteria", criteria)
        if self.max_time is not None:
            put(
                "max_time",
                real(
                    "max_time",
                    self.max_time,
                    lambda t: 0 < t < math.inf,
                    expected="None or seconds > 0",
                    remedy="None = no limit",
                ),
            )


def checked_stop_strings(value: object) -> tuple[str, ...]:
    """Check stop strings: one string, or a sequence of non-empty ones, returned as a tuple without repetitions.

    Raises:
        InputError: something else came.
    """
    if isinstance(value, str):
        value = (value,)
    strings = sequence("stop_strings", value, expected="strings", remedy="pass a list of strings")
    if not all(isinstance(s, str) and s for s in strings):
        raise InputError.of("stop_strings", expected="non-empty strings", got=value, remedy="drop the others")
    return tuple(dict.fromkeys(strings))  # type: ignore[arg-type]


def find_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return offset and text of the stop string that starts first (of those, the shortest), or None."""
    found = [(at, len(s), s) for s in strings if (at := text.find(s)) >= 0]
    if not found:
        return None
    at, _, string = min(found)
    return at, string


def cut_at_stop(text: str, strings: Sequence[str], *, include_stop: bool = False) -> str:
    """Return ``text`` up to its first stop string (with it, if ``include_stop``); all of it where none occurs."""
    stop = find_stop(text, strings)
    if stop is None:
        return text
    at, string = stop
    return text[: at + len(string)] if include_stop else text[:at]


class StopCheck:
    """Fed every committed token in order; says when the text is over.

    Args:
        options: the request's. eos_ids: the target's. room: tokens the context still holds, None for no limit.
        decode: ids of the continuation -> text, for stop strings.
        prompt: [L] int64 ids, for criteria. clock: seconds, for ``max_time``; it starts to run now.

    Attributes:
        remaining: tokens that may still be fed. stop_string: the stop string that ended the text, if one did.

    Raises:
        InputError: stop strings without ``decode``.
    """

    def __init__(
        self,
        options: StopOptions,
        *,
        eos_ids: Sequence[int],
        room: int | None,
        decode: Callable[[Sequence[int]], str] | None = None,
        prompt: Tensor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._window: TextWindow | None = None
        if options.stop_strings:
            if decode is None:
                raise InputError.of(
                    "stop_strings",
                    expected="a tokenizer to decode with",
                    got=None,
                    remedy="pass a tokenizer, or use stop_ids",
                )
            self._window = TextWindow(decode, keep=max(map(len, options.stop_strings)))
        self._eos = frozenset() if options.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(options.stop_ids)
        limit = options.max_new_tokens if room is None else min(room, options.max_new_tokens)
        self._cut = FinishReason.LENGTH if limit == options.max_new_tokens else FinishReason.CONTEXT
        self.remaining = limit
        self.stop_string: str | None = None
        self._ids = torch.empty(0, dtype=torch.int64) if prompt is None else prompt
        self._clock = clock
        self._deadline = math.inf if options.max_time is None else clock() + options.max_time

    def feed(self, token: int, *, ends_round: bool = True) -> FinishReason | None:
        """Book one token; return why the text is over, or None.

        Args:
            token: the id. ends_round: whether it is the last of those committed together; only behind such a one is the
                clock read, so that time cuts between rounds and never through one.

        Raises:
            InputError: a criterion or the tokenizer raised.
        """
        self.remaining -= 1
        if token in self._eos:
            return FinishReason.EOS
        if token in self._stop_ids:
            return FinishReason.STOP_ID
        if self._window is not None and self._completes_stop_string(token, self._window):
            return FinishReason.STOP_STRING
        if self._options.criteria and self._any_criterion(token):
            return FinishReason.CRITERIA
        if ends_round and self._options.max_time is not None and self._clock() > self._deadline:
            return FinishReason.TIME
        return self._cut if self.remaining <= 0 else None

    def _completes_stop_string(self, token: int, window: TextWindow) -> bool:
        try:
            window.push(token)
            stop = find_stop(window.text, self._options.stop_strings)
            if stop is not None:
                self.stop_string = stop[1]
                return True
            window.shrink(_UNSTABLE)
        except SpecdiffError:
            raise
        except Exception as error:
            raise InputError(
                f"stop_strings: the tokenizer raised {error!r} on token {token}; fix its decode, or use stop_ids"
            ) from error
        return False

    def _any_criterion(self, token: int) -> bool:
        self._ids = torch.cat([self._ids, torch.tensor([token])])
        for criterion in self._options.criteria:
            try:
                verdict = criterion(self._ids[None], None)  # type: ignore[arg-type]
                if bool(torch.as_tensor(verdict).all()):
                    return True
            except SpecdiffError:
                raise
            except Exception as error:
                raise InputError(
                    f"criteria: {type(criterion).__name__} raised {error!r} on ids of shape "
                    f"{tuple(self._ids[None].shape)}; fix it, or leave it out"
                ) from error
        return False
