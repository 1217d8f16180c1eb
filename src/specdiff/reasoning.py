"""Thinking against the clock: think for so many seconds, then be told to answer (SpecDiff-2, arXiv 2511.00606, 7.2).

The thought is an ordinary text with ``max_time``; what follows it is appended as token ids, so that the thought's own
tokens stay what they were when they were decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdiff.checking import integer
from specdiff.decoder import Generation, Prompt, SpeculativeDecoder
from specdiff.errors import ContextOverflowError, InputError
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

_QUESTION, _THOUGHT = "a question", "the thought so far"


@dataclass(frozen=True, kw_only=True)
class Closing:
    """What the target is told when its time is over.

    Attributes:
        instruction: the user's words, in a turn of their own behind the thought where the tokenizer has a chat
            template, behind a blank line where it has none.
        opening: how the answer begins, put into the target's mouth; "" leaves that to it.
        answer_tokens: most tokens of the answer, >= 1.

    Raises:
        InputError: no instruction and no opening, or answer_tokens below 1.
    """

    instruction: str = "The time to think is over. Give your final answer now."
    opening: str = "The final answer is"
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        integer("answer_tokens", self.answer_tokens, 1, remedy="the answer needs at least one")
        if not isinstance(self.instruction, str) or not isinstance(self.opening, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of(
                "closing", expected="texts", got=(self.instruction, self.opening), remedy="pass strings"
            )
        if not self.instruction.strip() and not self.opening.strip():
            raise InputError.of("closing", expected="an instruction or an opening", got="", remedy="leave it out")


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """A thought and the answer it led to.

    Attributes:
        thought: what was decoded before the cut; its ``finish`` is ``TIME`` where the clock ended it.
        answer: what the target said when told to answer, without `Closing.opening`.
        thought_seconds, answer_seconds: by the caller's clock.
    """

    thought: Generation
    answer: Generation
    thought_seconds: float
    answer_seconds: float


def reason(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    *,
    budget: float,
    closing: Closing | None = None,
    max_new_tokens: int = 2048,
    sampling: SamplingOptions | None = None,
    seed: int = 0,
    chat: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Reasoning:
    """Think about a prompt for ``budget`` seconds, then answer.

    The answer's own time is not part of the budget. A thought that ends by itself is closed as well, so that every
    answer comes in the same words.

    Args:
        prompt: as for `SpeculativeDecoder.generate`; ``chat`` wraps a text in the chat template.
        budget: seconds > 0, prefill included; the round in progress is finished.
        closing: None = `Closing()`. max_new_tokens: most tokens of the thought, less where the context is shorter.
        sampling, seed: of thought and answer. clock: seconds.

    Raises:
        InputError: a bad option. ContextOverflowError: prompt, closing and answer leave no room for a thought.
    """
    closing = closing or Closing()
    ids = decoder.encode(prompt, chat=chat)
    tail = closing_ids(decoder, closing, chat=chat)
    stop = StopOptions(max_new_tokens=thought_room(decoder, ids, tail, closing, max_new_tokens), max_time=budget)
    began = clock()
    thought = cast(Generation, decoder.generate(ids, sampling=sampling, stop=stop, seed=seed, clock=clock))
    thought_end = clock()
    answer = close(decoder, ids, thought.tokens, tail, closing, sampling=sampling, seed=seed, clock=clock)
    return Reasoning(
        thought=thought,
        answer=answer,
        thought_seconds=thought_end - began,
        answer_seconds=clock() - thought_end,
    )


def close(
    decoder: SpeculativeDecoder,
    prompt: Tensor,
    thought: Sequence[int],
    tail: Sequence[int],
    closing: Closing,
    *,
    sampling: SamplingOptions | None = None,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> Generation:
    """Decode the answer that follows a thought.

    Args:
        prompt: [L] int64 ids. thought: ids of the thought; an end token of the target's at its end is left out, since
            the closing ends the turn. tail: from `closing_ids`.
    """
    thought = list(thought)
    while thought and thought[-1] in decoder.target.eos_ids:
        thought.pop()
    ids = torch.cat([prompt, torch.tensor([*thought, *tail], dtype=torch.int64)])
    stop = StopOptions(max_new_tokens=closing.answer_tokens)
    if sampling is not None and sampling.min_new_tokens:  # meant for the thought
        sampling = replace(sampling, min_new_tokens=0)
    return cast(Generation, decoder.generate(ids, sampling=sampling, stop=stop, seed=seed, clock=clock))


def closing_ids(decoder: SpeculativeDecoder, closing: Closing, *, chat: bool) -> list[int]:
    """Ids that go behind a thought: the end of the target's turn, the instruction, the beginning of the answer.

    Raises:
        InputError: no tokenizer; or, with ``chat``, no template, or one that does not show turns in order.
    """
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise InputError.of("closing", expected="a decoder with a tokenizer", got=None, remedy="build it with one")
    text = _chat_tail(tokenizer, closing) if chat else f"\n\n{closing.instruction}\n"
    return cast("list[int]", tokenizer(text + closing.opening, add_special_tokens=False)["input_ids"])


def thought_room(
    decoder: SpeculativeDecoder, prompt: Tensor, tail: Sequence[int], closing: Closing, max_new_tokens: int
) -> int:
    """Most tokens a thought may have so that closing and answer still fit the target's context.

    Raises:
        ContextOverflowError: none.
    """
    integer("max_new_tokens", max_new_tokens, 1, remedy="a thought needs at least one token")
    if decoder.target.context is None:
        return max_new_tokens
    room = decoder.target.context - prompt.numel() - len(tail) - closing.answer_tokens
    if room < 1:
        raise ContextOverflowError.of(
            "prompt",
            expected=f"room for a thought beside {len(tail)} closing and {closing.answer_tokens} answer tokens in the "
            f"target's context of {decoder.target.context}",
            got=prompt.numel(),
            remedy="shorten the prompt",
        )
    return min(room, max_new_tokens)


def _chat_tail(tokenizer: PreTrainedTokenizerBase, closing: Closing) -> str:
    """What the template writes between the end of a thought and the beginning of the answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError.of("chat", expected="a tokenizer with a chat template", got="none", remedy="pass chat=False")
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _THOUGHT}]
    if closing.instruction.strip():
        messages.append({"role": "user", "content": closing.instruction})
    template = cast(Any, tokenizer).apply_chat_template
    text: str = template(messages, add_generation_prompt=True, tokenize=False)
    _, found, tail = text.partition(_THOUGHT)
    if not found or (closing.instruction.strip() and closing.instruction.strip() not in tail):
        raise InputError.of(
            "chat", expected="a template that shows the turns in order", got=text[-200:], remedy="pass chat=False"
        )
    return tail
