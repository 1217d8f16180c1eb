"""The forms that prompts come in: texts, chat messages, token ids; one of them or a batch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdiff.checking import sequence
from specdiff.errors import InputError

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | Tensor
"""Text, chat messages (``[{"role": ..., "content": ...}]``), or token ids [L]."""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """Tell one prompt from a list of prompts.

    Returns:
        (whether it was one prompt, the list of prompts).
    """
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = torch.as_tensor(prompts)
    if isinstance(prompts, Tensor) and prompts.ndim == 1:
        return True, [prompts]
    if isinstance(prompts, Tensor) and prompts.ndim != 2:
        shape = tuple(prompts.shape)
        raise InputError.of("prompts", expected="ids [L] or [B, L]", got=shape, remedy="pass one row of ids a prompt")
    items = sequence("prompts", prompts, expected="a prompt or a list of them", remedy="pass a text")
    if not items:
        raise InputError.of("prompts", expected="at least one prompt", got=prompts, remedy="pass a text")
    empty = [i for i, item in enumerate(items) if isinstance(item, (list, tuple)) and not item]
    if empty:
        raise InputError.of(
            f"prompts[{empty[0]}]", expected="at least one token or message", got=items[empty[0]], remedy="fill it"
        )
    if isinstance(items[0], (numbers.Integral, Mapping)):
        return True, [list(items)]  # type: ignore[list-item]
    return False, list(items)  # type: ignore[arg-type]


def is_ids(prompt: object) -> bool:
    """Whether a prompt is token ids, in any of the forms they come in, rather than text or messages."""
    if isinstance(prompt, (Tensor, np.ndarray)):
        return True
    items = sequence("prompt", [] if isinstance(prompt, str) else prompt, expected="a prompt", remedy="pass a text")
    return bool(items) and isinstance(items[0], numbers.Number)
