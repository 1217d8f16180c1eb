"""Messages in, token ids out, by the target's chat template: the same for decoding and for training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a prompt in the chat template, up to where the answer begins.

    Args:
        tokenizer: one that has a chat template.
        prompt: a text (one message of the user), or messages with ``role`` and ``content``.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    encoded: Any = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", messages), add_generation_prompt=True, return_dict=True
    )
    return encoded["input_ids"]
